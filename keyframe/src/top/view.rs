//! How the live view looks.
//!
//! ```text
//!   2 VMs                                   q quit  ↑↓ choose  space hold
//!   VM     STATE      NUMBER    AGE    PAUSE   PAGES  STORED  WHAT
//!  ▶web    running        41  0.4 s  2.10 ms   1,203   1.1 MiB idle
//!  ─ web ──────────────────────────────────────────────────────
//!   pause  ▁▂▁▁▃▁  2.10 ms         pages  ▁▁▂▁▇▁  1203
//!   (what `keyframe status` says of it)
//! ```

use crate::commands::status;
use crate::output;
use keyframe_session::control::status_history::{History, HistoryPoint, VmHistory};
use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Modifier, Style};
use ratatui::widgets::{Block, Borders, Paragraph, Row, Sparkline, Table, TableState, Wrap};

const HEADER: [&str; 8] = ["VM", "STATE", "NUMBER", "AGE", "PAUSE", "PAGES", "STORED", "WHAT"];

/// A VM's row, as `HEADER` says.
pub fn row(name: &str, vm: &VmHistory) -> Vec<String> {
    let s = &vm.status;
    let none = || "-".to_owned();
    let newest = vm.points.back();
    let number = newest.map_or_else(none, |point| point.number.to_string());
    let pause = newest.map_or_else(none, |point| output::duration(point.pause_ns));
    let pages = newest.map_or_else(none, |point| point.pages.to_string());
    let bytes = newest.map_or_else(none, |point| output::bytes(point.bytes));
    let (state, age, what) = match (&vm.silent, &s.replication) {
        (Some(why), _) => ("no answer".to_owned(), none(), why.clone()),
        (None, Some(of)) => {
            let lag = of
                .epoch
                .zip(of.acknowledged)
                .map_or(0, |(newest, there)| newest.saturating_sub(there));
            let what = format!("{}, {lag} behind, {} packets held", of.role, of.held_packets);
            (of.state.to_string(), output::duration(of.epoch_ns), what)
        }
        (None, None) => {
            let age = s.last_age_ns.map_or_else(none, output::duration);
            let late = |ns: &u64| *ns > s.interval_ns.unwrap_or_default() / 10;
            let backlog = Some(s.backlog_ns).filter(late);
            let backlog = backlog.map(|ns| format!("{} late", output::duration(ns)));
            let what = s.last_error.clone().or(backlog).unwrap_or_else(|| s.phase.to_string());
            let state = s.failing.map_or(s.state.to_string(), |cause| cause.to_string());
            (state, age, what)
        }
    };
    vec![name.to_owned(), state, number, age, pause, pages, bytes, what]
}

/// All of it as text, for where there is no terminal.
pub fn text(history: &History) -> String {
    if history.vms().len() == 0 {
        return status::NOTHING_RUNS.into();
    }
    output::table(&HEADER, &history.vms().map(|(name, vm)| row(name, vm)).collect::<Vec<_>>())
}

/// Draws it, with the VM that is `chosen` below.
pub fn draw(frame: &mut Frame<'_>, history: &History, chosen: &mut TableState, is_held: bool) {
    let count = history.vms().len();
    let rows = u16::try_from(count).unwrap_or(u16::MAX).saturating_add(1);
    let tall = rows.min(frame.area().height / 2).max(2);
    let [head, table, below] =
        Layout::vertical([Constraint::Length(1), Constraint::Length(tall), Constraint::Min(0)])
            .areas(frame.area());
    let held = if is_held { "  HELD" } else { "" };
    let vms = if count == 1 { "VM" } else { "VMs" };
    let keys = format!("{count} {vms}{held}   q quit   up/down choose   space hold");
    frame.render_widget(Paragraph::new(keys).style(bold()), head);
    if count == 0 {
        frame.render_widget(Paragraph::new(status::NOTHING_RUNS).wrap(Wrap { trim: true }), below);
        return;
    }
    chosen.select(Some(chosen.selected().unwrap_or(0).min(count - 1)));
    let cells: Vec<Vec<String>> = history.vms().map(|(name, vm)| row(name, vm)).collect();
    frame.render_stateful_widget(table_of(&cells), table, chosen);
    if let Some((name, vm)) = chosen.selected().and_then(|at| history.vms().nth(at)) {
        details(frame, below, name, vm);
    }
}

fn table_of(cells: &[Vec<String>]) -> Table<'static> {
    let width = |column: usize| {
        let widest = cells.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
        Constraint::Length(
            u16::try_from(widest.max(HEADER[column].len())).unwrap_or(u16::MAX).min(24),
        )
    };
    let mut widths: Vec<Constraint> = (0..HEADER.len() - 1).map(width).collect();
    widths.push(Constraint::Min(8));
    Table::new(cells.iter().map(|row| Row::new(row.clone())), widths)
        .header(Row::new(HEADER).style(bold()))
        .column_spacing(2)
        .row_highlight_style(Style::new().add_modifier(Modifier::REVERSED))
}

fn details(frame: &mut Frame<'_>, area: Rect, name: &str, vm: &VmHistory) {
    let block = Block::new().borders(Borders::TOP).title(format!(" {name} "));
    let inner = block.inner(area);
    frame.render_widget(block, area);
    let [curves, words] =
        Layout::vertical([Constraint::Length(4), Constraint::Min(0)]).areas(inner);
    let [left, right] = Layout::horizontal([Constraint::Fill(1); 2]).spacing(2).areas(curves);
    let newest = vm.points.back();
    let pause = newest.map_or_else(String::new, |point| output::duration(point.pause_ns));
    let pages = newest.map_or_else(String::new, |point| point.pages.to_string());
    let of = |get: fn(&HistoryPoint) -> u64| vm.points.iter().map(get).collect::<Vec<u64>>();
    curve(frame, left, &format!("pause {pause}"), &of(|point| point.pause_ns));
    curve(frame, right, &format!("pages {pages}"), &of(|point| point.pages));
    let words_of = vm.silent.clone().unwrap_or_else(|| status::text(&vm.status));
    frame.render_widget(Paragraph::new(words_of).wrap(Wrap { trim: false }), words);
}

/// The newest to the right.
fn curve(frame: &mut Frame<'_>, area: Rect, title: &str, values: &[u64]) {
    let newest = &values[values.len().saturating_sub(usize::from(area.width))..];
    let block = Block::new().title(title.to_owned());
    frame.render_widget(Sparkline::default().block(block).data(newest), area);
}

fn bold() -> Style {
    Style::new().add_modifier(Modifier::BOLD)
}

#[cfg(test)]
mod tests {
    use super::*;
    use keyframe_session::control::{EngineStatus, ReplicationState, ReplicationStatus, VmState};
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;

    fn drawn(history: &History, (width, height): (u16, u16)) -> String {
        let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
        terminal.draw(|frame| draw(frame, history, &mut TableState::default(), false)).unwrap();
        terminal.backend().to_string()
    }

    fn history(count: usize) -> History {
        let mut history = History::default();
        let of = |i: usize| EngineStatus {
            vm: format!("vm{i}"),
            state: VmState::Running,
            replication: (i == 1).then(|| ReplicationStatus {
                state: ReplicationState::Protected,
                epoch: Some(70),
                acknowledged: Some(69),
                pause_ns: 2_100_000,
                pages: 1203,
                ..Default::default()
            }),
            ..Default::default()
        };
        history.take((0..count).map(|i| (format!("vm{i}"), Ok(of(i)))).collect());
        history
    }

    #[test]
    fn what_is_to_be_known_is_on_the_screen() {
        let screen = drawn(&history(2), (120, 24));
        for word in ["2 VMs", "vm0", "vm1", "protected", "2.10 ms", "1203", "1 behind", "q quit"] {
            assert!(screen.contains(word), "{word}\n{screen}");
        }
        let text = text(&history(2));
        assert!(text.starts_with("VM ") && text.contains("protected"), "{text}");
    }

    #[test]
    fn any_terminal_and_any_number_of_vms_can_be_drawn() {
        for count in [0, 1, 40] {
            for size in [(1, 1), (5, 3), (20, 8), (200, 60)] {
                drawn(&history(count), size);
            }
        }
    }
}
