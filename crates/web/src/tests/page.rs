//! The page's files: what they must not have.

use crate::page::FILES;

/// Names come from outside: nothing may read them as HTML or as a program.
#[test]
fn nothing_is_set_but_as_text() {
    for (path, _, content) in FILES {
        for word in [
            "innerHTML",
            "outerHTML",
            "insertAdjacentHTML",
            "document.write",
            "eval(",
            "Function(",
            "srcdoc",
            "javascript:",
            "DOMParser",
        ] {
            assert!(!content.contains(word), "{path} has {word}");
        }
    }
}

/// It works offline, and no policy stands in its way: no inline scripts and styles, nothing from
/// elsewhere.
#[test]
fn it_needs_nothing_from_elsewhere() {
    for (path, kind, content) in FILES {
        let without_namespace = content.replace("http://www.w3.org/2000/svg", "");
        for word in ["http://", "https://", "//cdn", "@import", "url("] {
            assert!(!without_namespace.contains(word), "{path} has {word}");
        }
        if kind.starts_with("text/html") {
            for word in [" style=", " onclick", "<script>", "<style"] {
                assert!(!content.contains(word), "{path} has {word}");
            }
        }
    }
}

/// Whatever the page asks for by name is there.
#[test]
fn every_file_that_is_named_is_served() {
    for (path, _, content) in FILES {
        let quoted = content.split('"').skip(1).step_by(2);
        for name in quoted.filter(|word| [".js", ".css"].iter().any(|end| word.ends_with(end))) {
            let full = format!("/{}", name.trim_start_matches("./"));
            assert!(crate::page::file(&full).is_some(), "{path} names {name}");
        }
    }
}
