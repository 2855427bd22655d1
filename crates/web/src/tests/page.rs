//! Checks of the page's files.

use crate::page::FILES;

/// Names are untrusted: no script may use them as HTML or as a program.
#[test]
fn names_are_set_as_text_only() {
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

/// The page works offline and under its content security policy: no inline scripts or styles,
/// nothing from other servers.
#[test]
fn the_page_loads_nothing_from_other_servers() {
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

/// The page's files refer to existing files only.
#[test]
fn every_referenced_file_is_served() {
    for (path, _, content) in FILES {
        let quoted = content.split('"').skip(1).step_by(2);
        for name in quoted.filter(|word| [".js", ".css"].iter().any(|end| word.ends_with(end))) {
            let full = format!("/{}", name.trim_start_matches("./"));
            assert!(crate::page::file(&full).is_some(), "{path} names {name}");
        }
    }
}
