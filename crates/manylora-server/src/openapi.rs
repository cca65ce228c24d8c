//! `/openapi.json`: what the routes take and answer, for those who generate clients and tests. Written by hand beside the
//! code; tests hold its paths equal to the router's and its fields to those that are read.

use std::sync::Arc;

use axum::extract::State;
use axum::response::Response;
use serde_json::{Value, json};

use crate::answer;
use crate::app::App;
use crate::error::ApiError;

pub(crate) const PATH: &str = "/openapi.json";

fn document() -> Result<Value, serde_json::Error> {
    serde_json::from_str(include_str!("openapi.json"))
}

/// The document.
pub(crate) async fn show(State(app): State<Arc<App>>) -> Result<Response, ApiError> {
    let mut document = document().map_err(|error| ApiError::internal(error.to_string()))?;
    document["info"]["version"] = json!(env!("CARGO_PKG_VERSION"));
    if !app.routing.prefix.is_empty() {
        document["servers"] = json!([{"url": app.routing.prefix}]);
    }
    Ok(answer::json(&document))
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};
    use std::path::Path;

    use axum::Router;
    use axum::body::Body;
    use axum::http::{Request, StatusCode, header};
    use manylora::{Device, Engine, EngineConfig};
    use tower_service::Service;

    use super::*;
    use crate::config::ServerConfig;
    use crate::fields::asked::{self, How};
    use crate::routes::{Access, table};

    #[test]
    fn every_route_is_described_and_says_who_may_go_there() {
        let document = document().expect("JSON");
        let mut described = BTreeSet::new();
        for (path, operations) in document["paths"].as_object().expect("paths") {
            for (method, operation) in operations.as_object().expect("operations") {
                let security = operation.get("security").map_or(Value::Null, |all| all[0].clone());
                described.insert((path.clone(), method.clone(), security.to_string()));
            }
        }
        let routed: BTreeSet<_> = table()
            .iter()
            .flat_map(|route| {
                let security = match route.access {
                    Access::Anyone => Value::Null,
                    Access::Users => json!({"user": []}),
                    Access::Managers => json!({"admin": []}),
                };
                let path = route.path.replace("{*", "{");
                route.methods.iter().map(move |&method| (path.clone(), method.to_owned(), security.to_string()))
            })
            .collect();
        assert_eq!(described, routed);
    }

    #[test]
    fn references_lead_somewhere_and_operations_have_names() {
        fn walk(value: &Value, document: &Value) {
            match value {
                Value::Object(map) => {
                    if let Some(target) = map.get("$ref") {
                        let pointer = target.as_str().and_then(|target| target.strip_prefix('#')).expect("a pointer");
                        assert!(document.pointer(pointer).is_some(), "{pointer}");
                    }
                    map.values().for_each(|value| walk(value, document));
                }
                Value::Array(items) => items.iter().for_each(|value| walk(value, document)),
                _ => {}
            }
        }
        let document = document().expect("JSON");
        walk(&document, &document);
        let operations = document["paths"].as_object().expect("paths").values().filter_map(Value::as_object);
        let names: Vec<_> = operations.flat_map(|it| it.values()).map(|it| it["operationId"].to_string()).collect();
        assert_eq!(names.iter().collect::<BTreeSet<_>>().len(), names.len());
    }

    /// Fields of a schema and of those that it is made of; of objects among them that are read like a body, theirs too.
    fn properties(schema: &Value, document: &Value, found: &mut BTreeMap<String, How>) {
        if let Some(target) = schema.get("$ref").and_then(Value::as_str) {
            let pointer = target.trim_start_matches('#');
            return properties(document.pointer(pointer).expect("a schema"), document, found);
        }
        for part in schema.get("allOf").and_then(Value::as_array).into_iter().flatten() {
            properties(part, document, found);
        }
        for (name, property) in schema.get("properties").and_then(Value::as_object).into_iter().flatten() {
            let refused = property.to_string().contains(r##"{"$ref":"#/components/schemas/Refused""##);
            let holds = matches!(name.as_str(), "stream_options" | "structured_outputs");
            found.insert(name.clone(), if refused && !holds { How::Refused } else { How::Read });
            if holds {
                properties(property, document, found);
            }
        }
    }

    async fn post(router: &Router, path: &str, body: &Value) -> StatusCode {
        let request = Request::post(path)
            .header(header::CONTENT_TYPE, "application/json")
            .header(header::AUTHORIZATION, "Bearer admin")
            .body(Body::from(body.to_string()))
            .expect("a request");
        router.clone().call(request).await.expect("an answer").status()
    }

    #[test]
    fn the_fields_that_are_described_are_those_that_are_read() {
        let oracle = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/oracle/llama");
        let engine = Engine::start(EngineConfig {
            device: Device::Cpu,
            enable_lora: true,
            max_lora_rank: 64,
            kv_cache_memory_bytes: Some(16 << 20),
            num_threads: Some(1),
            ..EngineConfig::new(oracle.join("base"))
        })
        .expect("an engine");
        let config = ServerConfig {
            allow_runtime_lora_updating: true,
            admin_api_key: Some("admin".to_owned()),
            lora_root: Some(oracle.join("adapters")),
            ..ServerConfig::default()
        };
        let router = crate::routes::router(engine.handle(), config).expect("a router");
        // Bodies that lead through all that is read; who sends something else learns about it sooner.
        let message = json!([{"role": "user", "content": "x"}]);
        let events = json!({"include_usage": true});
        let bodies = [
            ("/v1/completions", json!({"prompt": "x", "max_tokens": 1, "stream": true, "stream_options": events}), 200),
            (
                "/v1/chat/completions",
                json!({"messages": message, "max_tokens": 1, "stream": true, "stream_options": events}),
                200,
            ),
            ("/tokenize", json!({"prompt": "x"}), 200),
            ("/tokenize", json!({"messages": message}), 200),
            ("/detokenize", json!({"tokens": [1]}), 200),
            ("/v1/load_lora_adapter", json!({"lora_name": "a", "lora_path": "alpha"}), 200),
            ("/v1/pin_lora_adapter", json!({"lora_name": "a"}), 200),
            ("/v1/unload_lora_adapter", json!({"lora_name": "a"}), 200),
        ];
        // On this thread, where what is asked for is written down.
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        let document = document().expect("JSON");
        let mut read: BTreeMap<&str, BTreeMap<String, How>> = BTreeMap::new();
        for (path, body, status) in &bodies {
            asked::forget();
            assert_eq!(runtime.block_on(post(&router, path, body)).as_u16(), *status, "{path}");
            read.entry(path).or_default().extend(asked::names());
        }
        let posts =
            table().into_iter().filter(|route| route.access != Access::Anyone && route.methods.contains(&"post"));
        for route in posts {
            let content = &document["paths"][route.path]["post"]["requestBody"]["content"]["application/json"];
            let mut described = BTreeMap::new();
            properties(&content["schema"], &document, &mut described);
            assert_eq!(Some(&described), read.get(route.path), "{}", route.path);
        }
    }
}
