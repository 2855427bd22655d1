//! `keyframe top`: the running VMs, live.

use crate::failure::{DONE, Failure, Outcome, USAGE};
use crate::output;
use crate::top::view;
use keyframe_session::control::status_history::{History, StatusAnswer};
use keyframe_session::control::{EngineRequest, EngineResponse, client};
use keyframe_session::{error_chain, run_dir};
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEventKind, KeyModifiers};
use ratatui::widgets::TableState;
use ratatui::{DefaultTerminal, init, restore};
use std::io::IsTerminal;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Show running VMs live: pauses, dirty pages, backlog, replication
#[derive(clap::Args, Debug)]
#[command(after_help = "Keys: q or Esc quits, up and down choose a VM, space holds the picture.

Examples:
  keyframe top
  keyframe top --every 200ms
  keyframe top --once            # a table, for scripts and logs; keyframe status --json has all of it")]
pub struct Top {
    /// How often the VMs are asked
    #[arg(long, value_name = "TIME", default_value = "1s", value_parser = super::checkpoints::parse_duration)]
    every: Duration,
    /// Print one table and end
    #[arg(long)]
    once: bool,
}

/// An engine that takes longer is shown as one that does not answer.
const ANSWER_MAX: Duration = Duration::from_secs(2);
/// More often is of no use to an eye, and a load on the engines.
const EVERY_MIN: Duration = Duration::from_millis(100);
/// The command reacts to a key or a signal within that time.
const LOOK: Duration = Duration::from_millis(100);

impl Top {
    /// Shows them until a key or a signal ends it.
    pub fn run(&self) -> Outcome {
        let mut history = History::default();
        if self.once {
            history.take(answers()?);
            output::print_line(&view::text(&history))?;
            return Ok(DONE);
        }
        if !std::io::stdout().is_terminal() || !std::io::stdin().is_terminal() {
            let failure = Failure::new("top needs a terminal");
            let fix = "use --once for a table, or keyframe status --json for scripts";
            return Err(Failure { code: USAGE, ..failure.fix(fix) });
        }
        let stop = keyframe_session::interrupt::interruption_or_hangup()?;
        let mut terminal = init();
        let shown = self.show(&mut terminal, &mut history, &stop);
        restore();
        shown.map(|()| DONE)
    }

    fn show(
        &self,
        terminal: &mut DefaultTerminal,
        history: &mut History,
        stop: &AtomicBool,
    ) -> Result<(), Failure> {
        let failed = |e: std::io::Error| Failure::new(format!("draw on the terminal: {e}"));
        let (mut chosen, mut is_held, mut asked) = (TableState::default(), false, None::<Instant>);
        let every = self.every.max(EVERY_MIN);
        while !stop.load(Ordering::Relaxed) {
            if !is_held && asked.is_none_or(|at| at.elapsed() >= every) {
                asked = Some(Instant::now());
                history.take(answers()?);
            }
            terminal
                .draw(|frame| view::draw(frame, history, &mut chosen, is_held))
                .map_err(failed)?;
            if !event::poll(LOOK).map_err(failed)? {
                continue;
            }
            // Another size is another picture: the next turn draws it.
            let Event::Key(key) = event::read().map_err(failed)? else { continue };
            if key.kind == KeyEventKind::Release {
                continue;
            }
            // In this mode the terminal makes no signal of Ctrl-C.
            let is_interrupt =
                key.modifiers.contains(KeyModifiers::CONTROL) && key.code == KeyCode::Char('c');
            match key.code {
                KeyCode::Char('q') | KeyCode::Esc => break,
                _ if is_interrupt => break,
                KeyCode::Char(' ') => is_held = !is_held,
                KeyCode::Up | KeyCode::Char('k') => chosen.select_previous(),
                KeyCode::Down | KeyCode::Char('j') => chosen.select_next(),
                _ => {}
            }
        }
        Ok(())
    }
}

/// Asks all engines for their status at the same time.
fn answers() -> Result<Vec<StatusAnswer>, Failure> {
    let engines = run_dir::all()?;
    let asked = client::ask_all(&engines, &EngineRequest::Status, ANSWER_MAX);
    Ok(asked
        .into_iter()
        .map(|(engine, answer)| {
            let status = match answer {
                Ok(EngineResponse::Status(status)) => Ok(*status),
                Ok(other) => Err(format!("unexpected answer: {other:?}")),
                Err(error) => Err(error_chain(&error)),
            };
            (run_dir::name_of(engine), status)
        })
        .collect())
}
