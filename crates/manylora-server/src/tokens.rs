//! `/tokenize` and `/detokenize`.

use std::sync::Arc;

use axum::Extension;
use axum::body::Body;
use axum::extract::State;
use axum::http::HeaderMap;
use axum::response::Response;
use manylora::EngineError;
use serde_json::json;

use crate::answer;
use crate::app::App;
use crate::body;
use crate::chat::Conversation;
use crate::error::ApiError;
use crate::fields::Fields;
use crate::keys::Caller;
use crate::target;

/// The fields of a body but those that say whom it is for, which is checked and makes no difference.
async fn read(app: &Arc<App>, caller: &Caller, headers: &HeaderMap, body: Body) -> Result<Fields, ApiError> {
    let mut fields = body::read(headers, body, app.config.max_body_bytes).await?;
    target::resolve(app, caller, &fields).await?;
    target::read(app, caller, &mut fields)?;
    Ok(fields)
}

/// Token ids of a prompt, or of messages through the chat template.
pub(crate) async fn tokenize(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, ApiError> {
    let mut fields = read(&app, &caller, &headers, body).await?;
    let spelled = fields.flag("return_token_strs")?.unwrap_or(false);
    let (text, add_special_tokens) = if let Some(text) = fields.text("prompt")? {
        (text, fields.flag("add_special_tokens")?.unwrap_or(true))
    } else {
        let tools = fields.array("tools")?.map(serde_json::Value::Array);
        let conversation = Conversation::read(&app, &mut fields, tools)?;
        let add_special_tokens = conversation.add_special_tokens;
        (conversation.render(&app).await?, add_special_tokens)
    };
    let (tokens, spellings) = app
        .blocking(move |app| {
            let tokenizer = app.engine.tokenizer()?;
            let tokens = tokenizer.encode(&text, add_special_tokens).map_err(EngineError::from)?;
            let spellings =
                spelled.then(|| tokens.iter().map(|&token| tokenizer.token_text(token)).collect::<Vec<_>>());
            Ok((tokens, spellings))
        })
        .await?;
    Ok(answer::json(&json!({
        "count": tokens.len(), "max_model_len": app.engine.info().max_model_len, "tokens": tokens, "token_strs": spellings,
    })))
}

/// Text of token ids.
pub(crate) async fn detokenize(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, ApiError> {
    let mut fields = read(&app, &caller, &headers, body).await?;
    let Some(tokens) = fields.tokens("tokens")? else {
        return Err(ApiError::bad_request("`tokens` is missing; give an array of token ids").about("tokens"));
    };
    let text = app
        .blocking(move |app| app.engine.tokenizer()?.decode(&tokens, false, true).map_err(EngineError::from))
        .await?;
    Ok(answer::json(&json!({"prompt": text})))
}
