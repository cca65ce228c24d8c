//! `/tokenize` and `/detokenize`.

use std::sync::Arc;

use axum::Extension;
use axum::body::Body;
use axum::extract::State;
use axum::http::HeaderMap;
use axum::response::Response;
use manylora::EngineError;
use serde::Serialize;
use serde_json::json;

use crate::answer;
use crate::app::{App, Pending};
use crate::chat::Conversation;
use crate::error::ApiError;
use crate::fields::Fields;
use crate::keys::Caller;
use crate::room::Room;
use crate::target;

/// Bytes of text that are encoded and token ids that are decoded even where no prompt can have as many.
const LEAST_BYTES: usize = 1 << 20;
const LEAST_TOKENS: usize = 1 << 17;

/// Reads a body: whom it is for, which is checked and makes no difference, and then what is worked on. Also gives what it was
/// given for as long as that takes.
async fn read<T: Send + 'static>(
    app: &Arc<App>,
    caller: &Caller,
    (headers, body): (&HeaderMap, Body),
    read: impl FnOnce(&App, &mut Fields) -> Result<T, ApiError> + Send + 'static,
) -> Result<(T, (Pending, Room)), ApiError> {
    let fields = app.read(headers, body).await?;
    target::resolve(app, caller, &fields).await?;
    let caller = caller.clone();
    let taken = app.take(fields, move |app, fields| {
        target::read(app, &caller, fields)?;
        let pending = app.admit(&caller, 1)?;
        Ok((read(app, fields)?, pending))
    });
    let ((read, pending), room) = taken.await?;
    Ok((read, (pending, room)))
}

/// What is to be tokens.
enum Given {
    Text { text: String, add_special_tokens: bool },
    Chat(Box<Conversation>),
}

#[derive(Serialize)]
struct Tokenized {
    count: usize,
    max_model_len: usize,
    tokens: Vec<u32>,
    token_strs: Option<Vec<String>>,
}

/// Token ids of a prompt, or of messages through the chat template.
pub(crate) async fn tokenize(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, ApiError> {
    let read = read(&app, &caller, (&headers, body), |app, fields| {
        let spelled = fields.flag("return_token_strs")?.unwrap_or(false);
        let given = if let Some(text) = fields.text("prompt")? {
            Given::Text { text, add_special_tokens: fields.flag("add_special_tokens")?.unwrap_or(true) }
        } else {
            let tools = fields.array("tools")?.map(serde_json::Value::Array);
            Given::Chat(Box::new(Conversation::read(app, fields, tools)?))
        };
        Ok((spelled, given))
    });
    let ((spelled, given), held) = read.await?;
    let (text, add_special_tokens, mut held) = match given {
        Given::Text { text, add_special_tokens } => (text, add_special_tokens, held),
        Given::Chat(conversation) => {
            let add_special_tokens = conversation.add_special_tokens;
            let (text, held) = conversation.render(&app, held).await?;
            (text, add_special_tokens, held)
        }
    };
    held.1.keep(text.len());
    let permit = app.encoding(text.len()).await?;
    app.blocking(move |app| {
        let tokenizer = app.engine.tokenizer()?;
        let (most, fewest) = (app.engine.info().max_model_len, tokenizer.fewest_tokens(&text));
        if fewest > most && text.len() > LEAST_BYTES {
            return Err(ApiError::bad_request(format!(
                "the text has `{}` bytes, which are `{fewest}` tokens at least, and the longest prompt has {most}; texts of up to \
                 {LEAST_BYTES} bytes are encoded in any case",
                text.len()
            ))
            .about("prompt"));
        }
        let tokens = tokenizer.encode(&text, add_special_tokens).map_err(EngineError::from)?;
        let token_strs = spelled.then(|| tokens.iter().map(|&token| tokenizer.token_text(token)).collect());
        let answer = answer::json(&Tokenized { count: tokens.len(), max_model_len: most, tokens, token_strs });
        drop((held, permit));
        Ok(answer)
    })
    .await
}

/// Text of token ids.
pub(crate) async fn detokenize(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, ApiError> {
    let read = read(&app, &caller, (&headers, body), |_, fields| {
        let missing = || ApiError::bad_request("`tokens` is missing; give an array of token ids").about("tokens");
        fields.tokens("tokens")?.ok_or_else(missing)
    });
    let (tokens, held) = read.await?;
    let most = app.engine.info().max_model_len.max(LEAST_TOKENS);
    if tokens.len() > most {
        return Err(
            ApiError::bad_request(format!("`tokens` has `{}` ids, and can have {most}", tokens.len())).about("tokens")
        );
    }
    app.blocking(move |app| {
        let text = app.engine.tokenizer()?.decode(&tokens, false, true).map_err(EngineError::from)?;
        let answer = answer::json(&json!({"prompt": text}));
        drop(held);
        Ok(answer)
    })
    .await
}
