//! Reports: a single, self-contained HTML file with tables and plots.
//!
//! ```text
//!   store ─────▶ entries ──▶ of_checkpoints ─┐
//!   recording ─▶ intervals ─▶ of_recording ──┴─▶ ReportPage ──▶ report.html      plots: inline SVG of `keyframe_plot`
//! ```
//!
//! Invariants: all text is escaped, and the file forbids scripts by its content security policy.
//! The file's size is bounded for any number of checkpoints: if there are many, each point of a
//! plot shows the longest pause of a group. Every number was measured in the reported runs.

pub mod of_checkpoints;
pub mod of_recording;

use crate::error::{Error, Result};
use keyframe_plot::Figure;
use maud::{DOCTYPE, PreEscaped, html};
use std::io::Write;
use std::path::Path;

/// The style sheet.
const STYLE: &str = "
:root { color-scheme: light dark; --soft: #5b6470; --line: #d4d8de; }
@media (prefers-color-scheme: dark) { :root { --soft: #9aa4b1; --line: #363c45; } }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1100px; margin: 1.5rem auto; padding: 0 1rem; overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; } h2 { margin-top: 2rem; border-bottom: 1px solid var(--line); } p.soft, caption { color: var(--soft); text-align: left; }
.wide { overflow-x: auto; } table { border-collapse: collapse; margin: .6rem 0 1.2rem; }
th, td { text-align: right; padding: .15rem .8rem .15rem 0; border-bottom: 1px solid var(--line); white-space: nowrap; }
th:first-child, td:first-child { text-align: left; white-space: normal; min-width: 6rem; } th { color: var(--soft); }
figure { margin: 1rem 0; background: #fff; border-radius: 6px; padding: .3rem; } figure svg { max-width: 100%; height: auto; display: block; }
@media print { body { max-width: none; } h2 { break-after: avoid; } figure, tr { break-inside: avoid; } }
";

/// A report as an HTML document, which is built from top to bottom.
pub struct ReportPage {
    title: String,
    /// HTML of the body so far.
    body: String,
}

impl ReportPage {
    /// Creates a report that has a title and nothing else.
    pub fn new(title: &str) -> Self {
        let body = html! { h1 { (title) } }.into_string();
        Self { title: title.into(), body }
    }

    fn add(&mut self, html: PreEscaped<String>) {
        self.body.push_str(&html.into_string());
        self.body.push('\n');
    }

    /// Adds a heading.
    pub fn part(&mut self, title: &str) {
        self.add(html! { h2 { (title) } });
    }

    /// Adds a paragraph.
    pub fn line(&mut self, text: &str) {
        self.add(html! { p { (text) } });
    }

    /// Adds a table. Its first column is aligned to the left, the others to the right.
    pub fn table(&mut self, caption: &str, header: &[&str], rows: &[Vec<String>]) {
        self.add(html! {
            div.wide {
                table {
                    caption { (caption) }
                    thead { tr { @for cell in header { th scope="col" { (cell) } } } }
                    tbody { @for row in rows { tr { @for cell in row { td { (cell) } } } } }
                }
            }
        });
    }

    /// Adds a table of names and values.
    pub fn facts(&mut self, caption: &str, facts: &[(&str, String)]) {
        let rows: Vec<Vec<String>> =
            facts.iter().map(|(name, value)| vec![(*name).into(), value.clone()]).collect();
        self.table(caption, &["", ""], &rows);
    }

    /// Adds a plot. `description` is shown below it, and read out by screen readers.
    ///
    /// Error: the plot cannot be drawn.
    pub fn figure(&mut self, figure: &Figure, description: &str) -> Result<()> {
        let svg = figure.svg()?;
        self.add(html! {
            figure role="img" aria-label=(description) { (PreEscaped(svg)) }
            p.soft { (description) }
        });
        Ok(())
    }

    /// Returns the whole document as HTML.
    pub fn html(&self) -> String {
        html! {
            (DOCTYPE)
            html lang="en" {
                head {
                    meta charset="utf-8";
                    meta http-equiv="Content-Security-Policy"
                        content="default-src 'none'; style-src 'unsafe-inline'";
                    meta name="viewport" content="width=device-width, initial-scale=1";
                    meta name="generator" content={ "Keyframe " (env!("CARGO_PKG_VERSION")) };
                    title { (self.title) }
                    style { (PreEscaped(STYLE)) }
                }
                body { (PreEscaped(&self.body)) }
            }
        }
        .into_string()
    }

    /// Writes the document to `path`, as a whole or not at all.
    ///
    /// Error: an I/O error, with the path.
    pub fn write(&self, path: &Path) -> Result<()> {
        let failed = |source| Error::Io { operation: format!("write {}", path.display()), source };
        let folder =
            path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let mut new = tempfile::NamedTempFile::new_in(folder).map_err(failed)?;
        new.write_all(self.html().as_bytes()).map_err(failed)?;
        new.persist(path).map_err(|e| failed(e.error))?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_escaped() {
        let hostile = "<script>alert(1)</script>\" onload='x' &amp;";
        let mut page = ReportPage::new(hostile);
        page.part(hostile);
        page.line(hostile);
        page.table(hostile, &[hostile], &[vec![hostile.into()]]);
        page.facts(hostile, &[("vm", hostile.into())]);
        let html = page.html();
        // An apostrophe needs no escape: every attribute is in double quotes.
        let escaped = "&lt;script&gt;alert(1)&lt;/script&gt;&quot; onload='x' &amp;amp;";
        assert!(!html.contains("<script") && !html.contains("\" onload"), "{html}");
        assert_eq!(html.matches(escaped).count(), html.matches("alert(1)").count(), "{html}");
        assert!(html.matches(escaped).count() >= 9, "{html}");
        assert!(html.contains("default-src 'none'"));
    }
}
