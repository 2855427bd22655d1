//! `keyframe status`: how running engines go.

use crate::control::{Request, Response, Status as Shown, client};
use crate::failure::{DONE, Failure, Outcome};
use crate::{output, rundir};
use std::time::Duration;

/// Show how running `keyframe run`s go
#[derive(clap::Args, Debug)]
#[command(after_help = "Examples:
  keyframe status
  keyframe status --name web --json")]
pub struct Status {
    /// Only this VM
    #[arg(long, value_name = "NAME")]
    name: Option<String>,
    /// Print a JSON array
    #[arg(long)]
    json: bool,
}

impl Status {
    /// Asks each engine and prints the answers.
    pub fn run(&self) -> Outcome {
        let engines = match &self.name {
            Some(name) => vec![rundir::find(Some(name))?],
            None => rundir::all()?,
        };
        let mut all = Vec::new();
        for engine in &engines {
            match client::ask(engine, &Request::Status, Duration::from_secs(10)) {
                Ok(Response::Status(status)) => all.push(*status),
                Ok(other) => return Err(Failure::new(format!("unexpected answer: {other:?}"))),
                // It may have ended between the look and the question.
                Err(e) if self.name.is_some() => return Err(e),
                Err(_) => {}
            }
        }
        if self.json {
            output::json(&all)?;
        } else if all.is_empty() {
            output::print_line(
                "nothing runs; start with: keyframe run --store STORE -- qemu-system-x86_64 ...",
            )?;
        } else {
            for status in &all {
                output::print_line(&text(status))?;
            }
        }
        Ok(DONE)
    }
}

fn text(s: &Shown) -> String {
    let every =
        s.interval_ns.map_or("by command only".into(), |ns| format!("every {}", output::duration(ns)));
    let qemu = if s.members.is_empty() {
        s.qemu_pid.to_string()
    } else {
        s.members.iter().map(|m| format!("{} {}", m.name, m.qemu_pid)).collect::<Vec<_>>().join(", ")
    };
    let mut lines = vec![
        format!("{}: {} (QEMU {qemu}, engine {}), {}", s.vm, s.state, s.engine_pid, s.phase),
        format!("  store       {}, checkpoints {every}", s.store),
        format!("  sealed      {}, failed {}", s.sealed, s.failed),
    ];
    if let (Some(last), Some(age)) = (&s.last, s.last_age_ns) {
        lines.push(format!(
            "  newest      {} ({} ago): pause {}, {} dirty pages, {} stored",
            last.id,
            output::duration(age),
            output::duration(last.pause_ns),
            last.dirty_pages,
            output::bytes(last.stored_bytes)
        ));
    }
    if let Some(why) = &s.tuned {
        lines.push(format!("  budget      {why}"));
    }
    if s.queued > 1 {
        lines.push(format!("  queued      {} checkpoints wait for the encoder", s.queued));
    }
    if s.backlog_ns > 0 {
        lines.push(format!("  backlog     {}", output::duration(s.backlog_ns)));
    }
    if let Some(error) = &s.last_error {
        lines.push(format!("  last error  {error}"));
    }
    lines.join("\n")
}
