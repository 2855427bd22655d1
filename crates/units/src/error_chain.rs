//! The text of an error for users.

/// Returns an error and its sources as one line, each part named once and separated by `: `.
pub fn error_chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(inner) = source {
        let part = inner.to_string();
        if !text.contains(&part) {
            text.push_str(": ");
            text.push_str(&part);
        }
        source = inner.source();
    }
    text
}

/// Returns the text of an error for users: [`error_chain`], and on a second line the fix, if it is
/// known.
pub fn error_with_fix(error: &dyn std::error::Error, fix: Option<String>) -> String {
    let line = error_chain(error);
    match fix {
        Some(fix) => format!("{line}\n  fix: {fix}"),
        None => line,
    }
}
