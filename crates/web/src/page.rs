//! The static files of the page. They are part of the program.

use axum::http::{HeaderValue, header};
use axum::response::{IntoResponse, Response};

/// The path, the content type and the contents of each file of the page.
pub const FILES: [(&str, &str, &str); 8] = [
    ("/", "text/html; charset=utf-8", include_str!("page/index.html")),
    ("/style.css", "text/css; charset=utf-8", include_str!("page/style.css")),
    ("/app.js", "text/javascript; charset=utf-8", include_str!("page/app.js")),
    ("/dom.js", "text/javascript; charset=utf-8", include_str!("page/dom.js")),
    ("/chart.js", "text/javascript; charset=utf-8", include_str!("page/chart.js")),
    ("/data.js", "text/javascript; charset=utf-8", include_str!("page/data.js")),
    ("/replication.js", "text/javascript; charset=utf-8", include_str!("page/replication.js")),
    ("/views.js", "text/javascript; charset=utf-8", include_str!("page/views.js")),
];

/// Returns the content type and the contents of the page's file at `path`. Returns `None` if there
/// is no such file.
pub fn file(path: &str) -> Option<(&'static str, &'static str)> {
    FILES.iter().find(|(known, ..)| *known == path).map(|(_, kind, content)| (*kind, *content))
}

/// Returns an answer with static content.
pub fn answer(kind: &'static str, content: &'static str) -> Response {
    ([(header::CONTENT_TYPE, HeaderValue::from_static(kind))], content).into_response()
}
