//! Keyframe: continuous checkpoints for stock QEMU virtual machines.
//!
//! Wiring only: each command is a file in `commands`, the work is done by the crates.

// First: the other modules use its macros.
#[macro_use]
mod output;

mod checkpoint_tables;
mod commands;
mod disk_writing;
mod failure;
mod fetched;
mod help;
mod progress;
mod rights;
mod top;
mod words;

use crate::failure::{Failure, FailureKind, Outcome, USAGE};
use clap::{ArgMatches, CommandFactory, FromArgMatches, Parser, Subcommand};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::ffi::OsString;
use std::process::ExitCode;

/// Continuous checkpoints for stock QEMU virtual machines
#[derive(Parser, Debug)]
#[command(name = "keyframe", version = env!("KEYFRAME_VERSION"), max_term_width = 110, disable_help_subcommand = true)]
#[command(after_help = "Put it in front of a QEMU command line:
  keyframe doctor
  keyframe init S
  keyframe run --store S -- qemu-system-x86_64 -m 1G -nographic ...
  keyframe list --store S
  keyframe restore --store S latest

A command in full: keyframe help COMMAND. Concepts: keyframe help topics

Exit codes: 0 done, 1 failed, 2 usage, 3 done with warnings, 4 guest panicked,
5 guest's watchdog expired, 10 no store, 11 store locked, 12 store full: newest checkpoints missing")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand, Debug)]
enum Command {
    Doctor(commands::doctor::Doctor),
    Init(commands::init::Init),
    Run(commands::run::Run),
    Attach(commands::attach::Attach),
    List(commands::list::List),
    Show(commands::show::Show),
    Restore(commands::restore::Restore),
    Branch(commands::branch::Branch),
    Rollback(commands::rollback::Rollback),
    Mount(commands::mount::Mount),
    Export(commands::export::Export),
    Import(commands::import::Import),
    Bundle(commands::bundle::Bundle),
    Commit(commands::commit::Commit),
    Check(commands::check::Check),
    Forget(commands::forget::Forget),
    Prune(commands::prune::Prune),
    Diff(commands::diff::Diff),
    Unlock(commands::unlock::Unlock),
    Copy(commands::copy::Copy),
    Tag(commands::tag::Tag),
    Pin(commands::pin::Pin),
    Serve(commands::serve::Serve),
    Stats(commands::stats::Stats),
    Report(commands::report::Report),
    Status(commands::status::Status),
    Top(commands::top::Top),
    Stop(commands::stop::Stop),
    Console(commands::console::Console),
    Take(commands::take::Take),
    Switch(commands::switch::Switch),
    Protect(commands::protect::Protect),
    Standby(commands::standby::Standby),
    Failover(commands::failover::Failover),
    Witness(commands::witness::Witness),
    Profile(commands::profile::ProfileCommand),
    Record(commands::record::Record),
    Segment(commands::segment::Segment),
    Log(commands::log::Log),
    Goto(commands::goto::Goto),
    Find(commands::find::Find),
    Analyze(commands::analyze::Analyze),
    Analysis(commands::analysis::Analysis),
    Plan(commands::plan::Plan),
    Verify(commands::verify::Verify),
    Help(commands::help::Help),
    Completions(commands::completions::Completions),
    Man(commands::man::Man),
    #[command(name = "__watchdog", hide = true)]
    Watchdog(commands::watchdog::Watchdog),
    #[command(name = "__switch", hide = true)]
    SwitchProcess(commands::switch::SwitchProcess),
    #[command(name = "__gate", hide = true)]
    GateProcess(commands::protect::GateProcess),
    #[command(name = "__guard", hide = true)]
    GuardProcess(commands::protect::GuardProcess),
    #[command(name = "__work", hide = true)]
    Work(commands::work::Work),
    #[command(name = "__disks", hide = true)]
    Disks(commands::disks::Disks),
}

impl Command {
    fn run(self) -> Outcome {
        match self {
            Self::Doctor(c) => c.run(),
            Self::Init(c) => c.run(),
            Self::Run(c) => c.run(),
            Self::Attach(c) => c.run(),
            Self::List(c) => c.run(),
            Self::Show(c) => c.run(),
            Self::Restore(c) => c.run(),
            Self::Branch(c) => c.run(),
            Self::Rollback(c) => c.run(),
            Self::Mount(c) => c.run(),
            Self::Export(c) => c.run(),
            Self::Import(c) => c.run(),
            Self::Bundle(c) => c.run(),
            Self::Commit(c) => c.run(),
            Self::Check(c) => c.run(),
            Self::Forget(c) => c.run(),
            Self::Prune(c) => c.run(),
            Self::Diff(c) => c.run(),
            Self::Unlock(c) => c.run(),
            Self::Copy(c) => c.run(),
            Self::Tag(c) => c.run(),
            Self::Pin(c) => c.run(),
            Self::Serve(c) => c.run(),
            Self::Stats(c) => c.run(),
            Self::Report(c) => c.run(),
            Self::Status(c) => c.run(),
            Self::Top(c) => c.run(),
            Self::Stop(c) => c.run(),
            Self::Console(c) => c.run(),
            Self::Take(c) => c.run(),
            Self::Switch(c) => c.run(),
            Self::Protect(c) => c.run(),
            Self::Standby(c) => c.run(),
            Self::Failover(c) => c.run(),
            Self::Witness(c) => c.run(),
            Self::GateProcess(c) => c.run(),
            Self::GuardProcess(c) => c.run(),
            Self::Profile(c) => c.run(),
            Self::Record(c) => c.run(),
            Self::Segment(c) => c.run(),
            Self::Log(c) => c.run(),
            Self::Goto(c) => c.run(),
            Self::Find(c) => c.run(),
            Self::Analyze(c) => c.run(),
            Self::Analysis(c) => c.run(),
            Self::Plan(c) => c.run(),
            Self::Verify(c) => c.run(),
            Self::Help(c) => c.run(),
            Self::Completions(c) => c.run(),
            Self::Man(c) => c.run(),
            Self::Watchdog(c) => c.run(),
            Self::SwitchProcess(c) => c.run(),
            Self::Work(c) => c.run(),
            Self::Disks(c) => c.run(),
        }
    }
}

/// The command line as it is parsed and explained.
fn cli() -> clap::Command {
    help::shaped(Cli::command())
}

/// The same as it is defined, for what has a form of its own.
fn plain_cli() -> clap::Command {
    Cli::command()
}

/// A store of many packs needs as many open files.
fn raise_open_files() {
    let limit = getrlimit(Resource::Nofile);
    // Where that is refused, opening the one too many says so.
    let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, maximum: limit.maximum });
}

/// True if a program reads the errors of the command, or of a command of it: it was given `--json`
/// or `--ready-fd`.
fn is_for_program(matches: &ArgMatches) -> bool {
    let json = matches.try_get_one::<bool>("json").ok().flatten();
    let ready = matches.try_get_one::<u32>("ready_fd").ok().flatten();
    json.copied().unwrap_or(false)
        || ready.is_some()
        || matches.subcommand().is_some_and(|(_, sub)| is_for_program(sub))
}

/// Prints why the command line is wrong, and exits. `clap` prints help and version here, too.
fn exit_for_usage(error: clap::Error) -> ! {
    let error = help::explained(error);
    let mut words = std::env::args_os().take_while(|word| word != "--");
    let is_for_program = |word: OsString| {
        ["--json", "--ready-fd"].iter().any(|option| word == *option)
            || word.as_encoded_bytes().starts_with(b"--ready-fd=")
    };
    if !error.use_stderr() || !words.any(is_for_program) {
        error.exit();
    }
    let text = error.render().to_string();
    let message = text.strip_prefix("error: ").unwrap_or(&text).trim_end();
    eprintln!("{}", Failure::new(message).of_kind(FailureKind::Usage).json());
    std::process::exit(USAGE.into())
}

fn main() -> ExitCode {
    raise_open_files();
    let matches = cli().try_get_matches().unwrap_or_else(|error| exit_for_usage(error));
    let is_for_program = is_for_program(&matches);
    let parsed = Cli::from_arg_matches(&matches);
    let command = parsed.unwrap_or_else(|error| exit_for_usage(error)).command;
    rights::give_up(&command);
    let outcome = command.run();
    fetched::tell();
    match outcome {
        Ok(code) => ExitCode::from(code),
        Err(failure) => {
            if is_for_program {
                eprintln!("{}", failure.json());
            } else {
                eprintln!("keyframe: {failure}");
            }
            ExitCode::from(failure.code)
        }
    }
}
