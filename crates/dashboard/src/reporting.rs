//! Reports: one HTML file with tables and plots, that needs nothing else and can be sent to
//! anybody.
//!
//! ```text
//!   store ─────▶ entries ──▶ of_checkpoints ─┐
//!   recording ─▶ intervals ─▶ of_recording ──┴─▶ Page ──▶ report.html      plots: SVG of `keyframe_plot`, within the file
//! ```
//!
//! Invariants: names are escaped wherever they stand, and the file tells the browser to run no
//! script; its size is bounded however many checkpoints there are (of many, a plot shows the
//! longest pause of each stretch); every number was measured in the runs it is about.

pub mod of_checkpoints;
pub mod of_recording;

use keyframe_failure::{Failure, chain};
use keyframe_plot::Figure;
use std::io::Write;
use std::path::Path;

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

/// A page that grows from top to bottom.
pub struct Page {
    title: String,
    body: String,
}

impl Page {
    /// With its title.
    pub fn new(title: &str) -> Self {
        Self { title: title.into(), body: format!("<h1>{}</h1>\n", escaped(title)) }
    }

    fn add(&mut self, what: std::fmt::Arguments<'_>) {
        // Writing to a string does not fail.
        let _ = std::fmt::Write::write_fmt(&mut self.body, what);
    }

    /// Begins a part.
    pub fn part(&mut self, title: &str) {
        self.add(format_args!("<h2>{}</h2>\n", escaped(title)));
    }

    /// A line of text.
    pub fn line(&mut self, text: &str) {
        self.add(format_args!("<p>{}</p>\n", escaped(text)));
    }

    /// A table, the first column of which is to the left.
    pub fn table(&mut self, caption: &str, header: &[&str], rows: &[Vec<String>]) {
        self.add(format_args!(
            "<div class=\"wide\"><table><caption>{}</caption><thead><tr>",
            escaped(caption)
        ));
        for cell in header {
            self.add(format_args!("<th scope=\"col\">{}</th>", escaped(cell)));
        }
        self.add(format_args!("</tr></thead><tbody>\n"));
        for row in rows {
            self.add(format_args!("<tr>"));
            for cell in row {
                self.add(format_args!("<td>{}</td>", escaped(cell)));
            }
            self.add(format_args!("</tr>\n"));
        }
        self.add(format_args!("</tbody></table></div>\n"));
    }

    /// Names and values.
    pub fn facts(&mut self, caption: &str, facts: &[(&str, String)]) {
        let rows: Vec<Vec<String>> =
            facts.iter().map(|(name, value)| vec![(*name).into(), value.clone()]).collect();
        self.table(caption, &["", ""], &rows);
    }

    /// A plot; `said` tells what it shows to those who do not see it.
    pub fn figure(&mut self, figure: &Figure, said: &str) -> Result<(), Failure> {
        let svg = figure.svg().map_err(|e| Failure::new(chain(&e)))?;
        let said = escaped(said);
        self.add(format_args!("<figure role=\"img\" aria-label=\"{said}\">{svg}</figure>\n"));
        self.add(format_args!("<p class=\"soft\">{said}</p>\n"));
        Ok(())
    }

    /// The whole document.
    pub fn html(&self) -> String {
        format!(
            "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\n\
             <meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n\
             <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
             <meta name=\"generator\" content=\"Keyframe {}\">\n<title>{}</title>\n<style>{STYLE}</style></head>\n<body>\n{}</body></html>\n",
            env!("CARGO_PKG_VERSION"),
            escaped(&self.title),
            self.body
        )
    }

    /// Writes it, whole or not at all.
    pub fn write(&self, path: &Path) -> Result<(), Failure> {
        let failed = |e: std::io::Error| Failure::new(format!("write {}: {e}", path.display()));
        let folder =
            path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let mut new = tempfile::NamedTempFile::new_in(folder).map_err(failed)?;
        new.write_all(self.html().as_bytes()).map_err(failed)?;
        new.persist(path).map_err(|e| failed(e.error))?;
        Ok(())
    }
}

/// As text in HTML, and in an attribute.
pub fn escaped(text: &str) -> String {
    let mut safe = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => safe.push_str("&amp;"),
            '<' => safe.push_str("&lt;"),
            '>' => safe.push_str("&gt;"),
            '"' => safe.push_str("&quot;"),
            '\'' => safe.push_str("&#39;"),
            c => safe.push(c),
        }
    }
    safe
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_stay_names() {
        let hostile = "<script>alert(1)</script>\" onload='x' &amp;";
        let mut page = Page::new(hostile);
        page.part(hostile);
        page.line(hostile);
        page.table(hostile, &[hostile], &[vec![hostile.into()]]);
        page.facts(hostile, &[("vm", hostile.into())]);
        let html = page.html();
        assert!(!html.contains("<script") && !html.contains("onload='"), "{html}");
        assert!(
            html.contains(
                "&lt;script&gt;alert(1)&lt;/script&gt;&quot; onload=&#39;x&#39; &amp;amp;"
            ),
            "{html}"
        );
        assert!(html.contains("default-src 'none'"));
    }
}
