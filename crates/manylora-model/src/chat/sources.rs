//! Where chat templates are found: beside a tokenizer, or in GGUF metadata.

use std::path::Path;

use serde_json::Value;

use crate::checkpoint::TokenizerSource;
use crate::error::ModelError;
use crate::tokenizer::Tokenizer;

use super::{ChatTemplate, DEFAULT};

impl ChatTemplate {
    /// The templates of a checkpoint; None when it has none ([`Self::missing`] is the error to show when one is
    /// needed).
    pub fn from_source(source: &TokenizerSource, tokenizer: &Tokenizer) -> Result<Option<Self>, ModelError> {
        match source {
            TokenizerSource::Directory(directory) => Self::from_directory(directory, tokenizer),
            TokenizerSource::Gguf(metadata) => {
                metadata.chat_template.as_deref().map(|template| Self::from_text(template, tokenizer)).transpose()
            }
        }
    }

    /// The templates of a folder, a base's or an adapter's: `chat_template.jinja` and `additional_chat_templates/`
    /// before `chat_template` in `tokenizer_config.json`.
    pub fn from_directory(directory: &Path, tokenizer: &Tokenizer) -> Result<Option<Self>, ModelError> {
        let mut templates = Vec::new();
        if let Some(text) = read_text(&directory.join("chat_template.jinja"))? {
            templates.push((DEFAULT.to_owned(), text));
        }
        templates.extend(additional(&directory.join("additional_chat_templates"))?);
        if templates.is_empty() {
            let path = directory.join("tokenizer_config.json");
            templates = configured(&path, &crate::tokenizer::read_object(&path)?["chat_template"])?;
        }
        if templates.is_empty() {
            return Ok(None);
        }
        Self::compile(templates, tokenizer.named_tokens().clone()).map(Some)
    }
}

/// One template as a string, or several as a list of `name` and `template`.
fn configured(path: &Path, value: &Value) -> Result<Vec<(String, String)>, ModelError> {
    let damaged = |what: String| ModelError::Malformed { path: path.to_path_buf(), message: what };
    match value {
        Value::Null => Ok(Vec::new()),
        Value::String(template) => Ok(vec![(DEFAULT.to_owned(), template.clone())]),
        Value::Array(templates) => templates
            .iter()
            .map(|entry| match (entry["name"].as_str(), entry["template"].as_str()) {
                (Some(name), Some(template)) => Ok((name.to_owned(), template.to_owned())),
                _ => Err(damaged("an entry of `chat_template` lacks `name` or `template`".to_owned())),
            })
            .collect(),
        _ => Err(damaged("`chat_template` is neither a string nor a list of named templates".to_owned())),
    }
}

fn additional(folder: &Path) -> Result<Vec<(String, String)>, ModelError> {
    let entries = match std::fs::read_dir(folder) {
        Ok(entries) => entries,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(source) => return Err(ModelError::Io { path: folder.to_path_buf(), source }),
    };
    let mut found = Vec::new();
    for entry in entries {
        let path = entry.map_err(|source| ModelError::Io { path: folder.to_path_buf(), source })?.path();
        let is_template = path.extension().is_some_and(|extension| extension == "jinja");
        if let (true, Some(stem)) = (is_template, path.file_stem())
            && let Some(text) = read_text(&path)?
        {
            found.push((stem.to_string_lossy().into_owned(), text));
        }
    }
    found.sort();
    Ok(found)
}

fn read_text(path: &Path) -> Result<Option<String>, ModelError> {
    let Some(bytes) = crate::tokenizer::read_optional(path)? else {
        return Ok(None);
    };
    String::from_utf8(bytes).map(Some).map_err(|_| ModelError::Malformed {
        path: path.to_path_buf(),
        message: "the template is not UTF-8 text".to_owned(),
    })
}
