//! Compares the description of the API with its behaviour.

use super::Served;
use crate::api::{self, OPENAPI};
use crate::synthetic::STORE;
use serde_json::Value;
use std::collections::BTreeSet;

fn described() -> Value {
    serde_json::from_str(OPENAPI).unwrap()
}

#[test]
fn the_described_routes_are_the_routes() {
    let described = described();
    assert_eq!(described["openapi"], "3.1.0");
    let mut found = BTreeSet::new();
    for (path, methods) in described["paths"].as_object().unwrap() {
        found.extend(
            methods.as_object().unwrap().keys().map(|method| (method.clone(), path.clone())),
        );
    }
    let known =
        api::routes().known.into_iter().map(|(method, path)| (method.to_owned(), path.to_owned()));
    assert_eq!(found, known.collect());
    assert_eq!(Served::on_loopback().get("/api/v1/openapi.json").json(), described);
}

/// Every parameter of a path is described, and every reference exists.
#[test]
fn the_description_is_complete() {
    let described = described();
    for (path, methods) in described["paths"].as_object().unwrap() {
        for (method, operation) in methods.as_object().unwrap() {
            let parameters = operation["parameters"].as_array().cloned().unwrap_or_default();
            let named: BTreeSet<&str> = parameters
                .iter()
                .filter(|p| p["in"] == "path")
                .map(|p| p["name"].as_str().unwrap())
                .collect();
            let wanted: BTreeSet<&str> = path
                .split('/')
                .filter_map(|part| part.strip_prefix('{')?.strip_suffix('}'))
                .collect();
            assert_eq!(named, wanted, "{method} {path}");
            assert!(
                operation["summary"].is_string() && operation["responses"]["200"].is_object(),
                "{method} {path}"
            );
            let is_free = operation["security"]
                .as_array()
                .unwrap()
                .iter()
                .any(|one| one == &serde_json::json!({}));
            assert_eq!(is_free, method == "get", "{method} {path}");
        }
    }
    let mut waiting = vec![&described];
    while let Some(value) = waiting.pop() {
        if let Some(to) = value.get("$ref").and_then(Value::as_str) {
            assert!(described.pointer(to.trim_start_matches('#')).is_some(), "{to}");
        }
        waiting.extend(value.as_object().into_iter().flat_map(|object| object.values()));
        waiting.extend(value.as_array().into_iter().flatten());
    }
}

/// Each answer has what its schema requires, and nothing that the schema does not describe.
#[test]
fn answers_match_their_schema() {
    let (described, served) = (described(), Served::on_loopback());
    let mut checked = 0;
    for (path, methods) in described["paths"].as_object().unwrap() {
        let schema = &methods["get"]["responses"]["200"]["content"]["application/json"]["schema"];
        if schema.is_null() {
            continue;
        }
        let asked = path.replace("{store}", STORE).replace("{id}", "8");
        check(&described, schema, &served.get(&asked).json(), path);
        checked += 1;
    }
    assert!(checked > 10, "{checked}");
    let error = served.get("/nothing").json();
    check(&described, &described["components"]["schemas"]["Error"], &error, "an error");
}

fn check(described: &Value, schema: &Value, value: &Value, at: &str) {
    let schema = schema["$ref"]
        .as_str()
        .map_or(schema, |to| described.pointer(to.trim_start_matches('#')).unwrap());
    let kinds = match &schema["type"] {
        Value::Array(kinds) => kinds.iter().filter_map(Value::as_str).collect(),
        kind => Vec::from_iter(kind.as_str()),
    };
    let kind = match value {
        Value::Null => "null",
        Value::Bool(_) => "boolean",
        Value::Number(n) if n.is_f64() => "number",
        Value::Number(_) => "integer",
        Value::String(_) => "string",
        Value::Array(_) => "array",
        Value::Object(_) => "object",
    };
    assert!(
        kinds.contains(&kind) || (kind == "integer" && kinds.contains(&"number")),
        "{at}: {value} is no {kinds:?}"
    );
    for (index, item) in value.as_array().into_iter().flatten().enumerate() {
        check(described, &schema["items"], item, &format!("{at}[{index}]"));
    }
    let (Some(object), Some(known)) = (value.as_object(), schema["properties"].as_object()) else {
        return;
    };
    for required in schema["required"].as_array().into_iter().flatten() {
        assert!(object.contains_key(required.as_str().unwrap()), "{at} lacks {required}");
    }
    for (name, inner) in object {
        match known.get(name) {
            Some(schema) => check(described, schema, inner, &format!("{at}.{name}")),
            None => {
                assert_eq!(
                    schema["additionalProperties"], true,
                    "{at} has {name}, which is not described"
                );
            }
        }
    }
}
