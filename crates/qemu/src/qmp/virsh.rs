//! The monitor of a VM that libvirt runs, through `virsh`: libvirt holds the socket itself and
//! passes commands on.
//!
//! ```text
//!   requests ──▶ virsh ──▶ libvirt ──▶ QEMU           one virsh for all requests: a start costs tens of ms
//!   answers  ◀──  │
//!                 └ qemu-monitor-command 'DOMAIN' '{"execute": ...}'
//!                   echo "KF""END-<token>-<n>."       its output ends the answer to request n
//!
//!   events   ◀── virsh qemu-monitor-event --loop ◀── libvirt ◀── QEMU         with QEMU's own time stamps
//! ```
//!
//! Fed through a pipe, virsh repeats its input and its prompt in its output (readline does), and
//! says of a command that failed in libvirt why on its standard error. So an answer is the one line
//! of JSON before the mark; the mark has a token that no guest can know and is written so that its
//! repetition does not match it. libvirt puts in the ids of requests, so ours are kept here.
//!
//! Invariants:
//! 1. Answers are matched by their mark: the late answer of a request that was given up is not
//!    taken for another's.
//! 2. Both children end with us, however we end: the one sees the end of its input, the other is
//!    ended by a shell that does.
//!
//! Left out: libvirt's library, which would have to be there at build time; connections to other
//! hosts, for the VM's memory must be here.

use crate::{Error, Result};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use serde_json::{Value, json};
use std::collections::VecDeque;
use std::hash::{BuildHasher, Hasher};
use std::io::Write;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::time::{Duration, Instant};

/// The most that is kept of an answer or of an event.
const BYTES_MAX: usize = 16 << 20;
/// How long libvirt may take to connect.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(20);
/// How long a child may take to end.
const END_TIMEOUT: Duration = Duration::from_secs(2);
/// Runs its arguments until its input ends.
const UNTIL_INPUT_ENDS: &str =
    r#""$@" </dev/null & exec >&-; read -r _; kill $! 2>/dev/null; wait"#;
/// The texts with which libvirt reports that the VM has ended.
const ENDED: &[&str] = &[
    "not running",
    "no longer running",
    "failed to get domain",
    "Domain not found",
    "End of file",
];

/// A child with pipes that do not block.
struct Piped {
    child: Child,
    stdin: Option<ChildStdin>,
    out: Pipe,
    errors: Pipe,
}

/// The reading end of a pipe and what came out of it.
struct Pipe {
    fd: OwnedFd,
    bytes: Vec<u8>,
    ended: bool,
}

/// A VM's monitor as libvirt offers it.
pub struct Virsh {
    name: String,
    domain: String,
    uri: Option<String>,
    shell: Piped,
    /// The descriptors that `shell` has.
    inherited: Vec<RawFd>,
    events: Piped,
    token: u64,
    /// The ids of requests under way, by their mark.
    asked: VecDeque<(u64, u64)>,
    marks: u64,
    ready: VecDeque<Value>,
}

impl Virsh {
    /// Connects to `domain` (its name or UUID) at libvirt's `uri`, or at virsh's default. `passed`
    /// are the descriptors that requests pass without a virsh of their own. Errors: the name cannot
    /// be given to virsh; virsh cannot be started, or cannot connect.
    pub fn connect(domain: &str, uri: Option<&str>, passed: &[&OwnedFd]) -> Result<Self> {
        if domain.is_empty() || domain.contains(['\'', '\\']) || domain.contains(char::is_control) {
            return Err(refused(
                domain,
                "its name cannot be given to virsh",
                "name it by its UUID",
            ));
        }
        let shell = Piped::start(&mut virsh(uri), passed, domain)?;
        let mut watching = Command::new("sh");
        watching.args(["-c", UNTIL_INPUT_ENDS, "sh"]).arg("virsh").args(virsh(uri).get_args());
        // The first command prints a line, which says that there is a connection.
        watching.arg(format!("domid '{domain}'; qemu-monitor-event --loop --domain '{domain}'"));
        let events = Piped::start(&mut watching, &[], domain)?;
        let mut virsh = Self {
            name: format!("of libvirt's domain {domain}"),
            domain: domain.into(),
            uri: uri.map(str::to_owned),
            shell,
            inherited: passed.iter().map(|fd| fd.as_raw_fd()).collect(),
            events,
            token: std::hash::RandomState::new().build_hasher().finish(),
            asked: VecDeque::new(),
            marks: 0,
            ready: VecDeque::new(),
        };
        virsh.wait_for_events()?;
        Ok(virsh)
    }

    /// Returns the name that errors use for the connection.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Sends a request, and along with it the descriptor `passed`, if there is one. A descriptor
    /// that is not among those of [`Self::connect`] needs a virsh of its own, which takes some tens
    /// of milliseconds. Error: virsh cannot be started, does not answer, or has ended.
    pub fn send(
        &mut self,
        message: &Value,
        passed: Option<BorrowedFd<'_>>,
        operation: &str,
    ) -> Result<()> {
        let mut request = message.clone();
        let id = request
            .as_object_mut()
            .and_then(|o| o.remove("id"))
            .and_then(|id| id.as_u64())
            .unwrap_or(0);
        if let Some(fd) = passed.filter(|fd| !self.inherited.contains(&fd.as_raw_fd())) {
            let answer = self.send_alone(&request, fd, operation)?;
            self.ready.push_back(with_id(answer, id));
            return Ok(());
        }
        self.marks += 1;
        let mark = self.marks;
        let passed = passed.map_or(String::new(), |fd| format!("--pass-fds {} ", fd.as_raw_fd()));
        let line = format!(
            "qemu-monitor-command {passed}--domain '{}' '{}'\necho \"KF\"\"END-{:x}-{mark}.\"\n",
            self.domain,
            plain(&request.to_string()),
            self.token
        );
        let stdin = self.shell.stdin.as_mut();
        let written = stdin
            .map_or(Err(std::io::ErrorKind::BrokenPipe.into()), |i| i.write_all(line.as_bytes()));
        match written {
            Ok(()) => {
                self.asked.push_back((mark, id));
                Ok(())
            }
            Err(e) if e.kind() == std::io::ErrorKind::BrokenPipe => {
                Err(self.broken("virsh has ended"))
            }
            Err(e) => {
                Err(Error::io(format!("write to virsh for {} ({operation})", self.domain))(e))
            }
        }
    }

    /// Sends a request with a descriptor by a virsh of its own, and waits for the answer.
    fn send_alone(
        &self,
        request: &Value,
        passed: BorrowedFd<'_>,
        operation: &str,
    ) -> Result<serde_json::Map<String, Value>> {
        let passed = passed.try_clone_to_owned().map_err(Error::io("duplicate a descriptor"))?;
        let mut command = virsh(self.uri.as_deref());
        command.args(["qemu-monitor-command", "--pass-fds", &passed.as_raw_fd().to_string()]);
        command.args(["--domain", &self.domain, &plain(&request.to_string())]);
        let said = output(&mut command, &[&passed], (&self.domain, &self.name), operation)?;
        self.answer_in(&said.0, &said.1, operation)
    }

    /// The answer in what a virsh printed; QEMU's form of an error if libvirt refused the command.
    ///
    /// Error: [`Error::Gone`] if `complaint`, its standard error, says that the VM has ended.
    fn answer_in(
        &self,
        said: &[u8],
        complaint: &str,
        operation: &str,
    ) -> Result<serde_json::Map<String, Value>> {
        match answer(&String::from_utf8_lossy(said)) {
            Some(answer) => Ok(answer),
            None if ENDED.iter().any(|words| complaint.contains(words)) => {
                Err(Error::Gone { monitor: self.name.clone(), operation: operation.into() })
            }
            None => Ok([("error".into(), json!({ "desc": complaint }))].into_iter().collect()),
        }
    }

    /// Returns the next answer or event, waiting for at most `timeout`. Error: the time has passed,
    /// or virsh or QEMU has ended.
    pub fn receive(&mut self, operation: &str, timeout: Duration) -> Result<Value> {
        let deadline = Instant::now() + timeout;
        loop {
            if let Some(message) = self.receive_now(operation)? {
                return Ok(message);
            }
            if Instant::now() >= deadline {
                return Err(Error::Timeout {
                    monitor: self.name.clone(),
                    operation: operation.into(),
                    waited_ms: u64::try_from(timeout.as_millis()).unwrap_or(u64::MAX),
                });
            }
            let fds = [&self.shell.out.fd, &self.events.out.fd];
            wait_until(&fds, deadline, &self.name)?;
        }
    }

    /// Returns the next answer or event; `None` if none has arrived. Error: virsh or QEMU has
    /// ended.
    pub fn receive_now(&mut self, operation: &str) -> Result<Option<Value>> {
        if let Some(message) = self.ready.pop_front() {
            return Ok(Some(message));
        }
        self.take_events()?;
        self.take_answers(operation)?;
        Ok(self.ready.pop_front())
    }

    fn take_events(&mut self) -> Result<()> {
        self.events.out.fill(&self.name)?;
        while let Some(end) = self.events.out.bytes.iter().position(|b| *b == b'\n') {
            let line: Vec<u8> = self.events.out.bytes.drain(..=end).collect();
            self.ready.extend(event(&String::from_utf8_lossy(&line)));
        }
        if self.events.out.ended && self.ready.is_empty() {
            // Without events Keyframe would not notice that another client let the VM run in a
            // pause.
            let why = self.events.errors.text(&self.name);
            return Err(self.broken(&format!("virsh no longer tells of events {why}")));
        }
        Ok(())
    }

    fn take_answers(&mut self, operation: &str) -> Result<()> {
        self.shell.out.fill(&self.name)?;
        while let Some((mark, id)) = self.asked.front().copied() {
            let end = format!("KFEND-{:x}-{mark}.", self.token);
            let bytes = &self.shell.out.bytes;
            let Some(at) = bytes.windows(end.len()).position(|w| w == end.as_bytes()) else {
                break;
            };
            self.asked.pop_front();
            let said: Vec<u8> = self.shell.out.bytes.drain(..at + end.len()).collect();
            let complaint = self.shell.errors.text(&self.name);
            let answer = self.answer_in(&said, &complaint, operation)?;
            self.ready.push_back(with_id(answer, id));
        }
        if self.shell.out.ended && self.ready.is_empty() {
            let why = self.shell.errors.text(&self.name);
            return Err(self.broken(&format!("virsh has ended {why}")));
        }
        Ok(())
    }

    /// Waits until virsh is connected and about to ask for events.
    fn wait_for_events(&mut self) -> Result<()> {
        let deadline = Instant::now() + CONNECT_TIMEOUT;
        loop {
            self.events.out.fill(&self.name)?;
            if self.events.out.bytes.contains(&b'\n') {
                return Ok(());
            }
            if self.events.out.ended || Instant::now() >= deadline {
                let why = self.events.errors.text(&self.name);
                return Err(refused(
                    &self.domain,
                    &format!("virsh cannot reach it: {why}"),
                    "see `virsh list`; name another libvirt by its URI, and attach as a user that may use it",
                ));
            }
            wait_until(&[&self.events.out.fd], deadline, &self.name)?;
        }
    }

    fn broken(&self, problem: &str) -> Error {
        Error::Libvirt {
            domain: self.domain.clone(),
            problem: problem.trim().into(),
            fix: "attach again; the VM runs on without checkpoints".into(),
        }
    }
}

/// Returns the description of `domain` at libvirt's `uri` as XML; `None` for virsh's default.
/// Errors: virsh cannot be started, or does not know the domain.
pub fn domain_xml(domain: &str, uri: Option<&str>) -> Result<String> {
    let mut command = virsh(uri);
    command.args(["dumpxml", "--domain", domain]);
    let name = format!("of libvirt's domain {domain}");
    let (xml, complaint) = output(&mut command, &[], (domain, &name), "describe the domain")?;
    if xml.is_empty() {
        return Err(refused(domain, &complaint, "see `virsh dumpxml`"));
    }
    Ok(String::from_utf8_lossy(&xml).into_owned())
}

/// Runs a virsh to its end. Returns what it printed, and its standard error as one line.
fn output(
    command: &mut Command,
    passed: &[&OwnedFd],
    (domain, monitor): (&str, &str),
    operation: &str,
) -> Result<(Vec<u8>, String)> {
    let mut alone = Piped::start(command, passed, domain)?;
    alone.stdin = None;
    let deadline = Instant::now() + CONNECT_TIMEOUT;
    while !alone.out.ended {
        if Instant::now() >= deadline {
            return Err(Error::Timeout {
                monitor: monitor.into(),
                operation: operation.into(),
                waited_ms: u64::try_from(CONNECT_TIMEOUT.as_millis()).unwrap_or(u64::MAX),
            });
        }
        wait_until(&[&alone.out.fd], deadline, monitor)?;
        alone.out.fill(monitor)?;
    }
    let complaint = alone.errors.text(monitor);
    Ok((std::mem::take(&mut alone.out.bytes), complaint))
}

fn with_id(mut answer: serde_json::Map<String, Value>, id: u64) -> Value {
    answer.insert("id".into(), id.into());
    Value::Object(answer)
}

fn refused(domain: &str, problem: &str, fix: &str) -> Error {
    Error::Libvirt { domain: domain.into(), problem: problem.trim().into(), fix: fix.into() }
}

impl AsFd for Virsh {
    /// Readable when events have arrived.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.events.out.fd.as_fd()
    }
}

impl Piped {
    fn start(command: &mut Command, passed: &[&OwnedFd], domain: &str) -> Result<Self> {
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        // Not ended by the Ctrl-C that ends us in good order.
        command.process_group(0);
        let mut child = crate::spawn::start(command, passed).map_err(|e| match e {
            Error::Io { source, .. } if source.kind() == std::io::ErrorKind::NotFound => refused(
                domain,
                "there is no virsh in PATH",
                "install libvirt's client (Debian: libvirt-clients)",
            ),
            other => other,
        })?;
        let (stdin, out, errors) = (child.stdin.take(), child.stdout.take(), child.stderr.take());
        let (Some(stdin), Some(out), Some(errors)) = (stdin, out, errors) else {
            return Err(refused(domain, "virsh was started without pipes", "attach again"));
        };
        let (out, errors) = (Pipe::new(out.into())?, Pipe::new(errors.into())?);
        unblock(&stdin)?;
        Ok(Self { child, stdin: Some(stdin), out, errors })
    }
}

impl Drop for Piped {
    fn drop(&mut self) {
        self.stdin = None;
        let deadline = Instant::now() + END_TIMEOUT;
        while Instant::now() < deadline {
            if !matches!(self.child.try_wait(), Ok(None)) {
                return;
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        if let Some(group) = rustix::process::Pid::from_raw(self.child.id().cast_signed()) {
            let _ = rustix::process::kill_process_group(group, rustix::process::Signal::KILL);
        }
        let _ = self.child.wait();
    }
}

impl Pipe {
    fn new(fd: OwnedFd) -> Result<Self> {
        unblock(&fd)?;
        Ok(Self { fd, bytes: Vec::new(), ended: false })
    }

    /// Reads the output that has arrived.
    fn fill(&mut self, monitor: &str) -> Result<()> {
        let mut chunk = [0u8; 16 << 10];
        while !self.ended {
            match rustix::io::read(&self.fd, &mut chunk[..]) {
                Ok(0) => self.ended = true,
                Ok(len) => self.bytes.extend_from_slice(chunk.get(..len).unwrap_or_default()),
                Err(Errno::AGAIN) => break,
                Err(Errno::INTR) => {}
                Err(e) => return Err(Error::io(format!("read from virsh, monitor {monitor}"))(e)),
            }
            if self.bytes.len() > BYTES_MAX {
                let problem = format!("virsh said more than {BYTES_MAX} bytes at once");
                return Err(Error::Protocol {
                    monitor: monitor.into(),
                    operation: "read".into(),
                    problem,
                });
            }
        }
        Ok(())
    }

    /// Returns the output since the last call as one short line.
    fn text(&mut self, monitor: &str) -> String {
        // Of a complaint that cannot be read, nothing.
        let _ = self.fill(monitor);
        let text = String::from_utf8_lossy(&std::mem::take(&mut self.bytes)).into_owned();
        let lines = text
            .lines()
            .map(|line| line.trim().trim_start_matches("error: "))
            .filter(|l| !l.is_empty());
        lines.collect::<Vec<_>>().join("; ").chars().take(400).collect()
    }
}

fn virsh(uri: Option<&str>) -> Command {
    let mut command = Command::new("virsh");
    command.arg("-q");
    if let Some(uri) = uri {
        command.args(["-c", uri]);
    }
    // Our commands are not to appear in the user's history, nor the user's habits in how our lines
    // are read.
    command
        .env("XDG_CACHE_HOME", "/dev/null")
        .env("INPUTRC", "/dev/null")
        .env("TERM", "dumb")
        .env("LC_ALL", "C");
    command
}

fn unblock(fd: impl AsFd) -> Result<()> {
    rustix::io::ioctl_fionbio(fd, true).map_err(Error::io("make a pipe to virsh non-blocking"))
}

fn wait_until(fds: &[&OwnedFd], deadline: Instant, monitor: &str) -> Result<()> {
    let left = deadline.saturating_duration_since(Instant::now());
    let limit =
        Timespec { tv_sec: left.as_secs().cast_signed(), tv_nsec: left.subsec_nanos().into() };
    let mut fds: Vec<_> = fds.iter().map(|fd| PollFd::new(*fd, PollFlags::IN)).collect();
    match poll(&mut fds, Some(&limit)) {
        Ok(_) | Err(Errno::INTR) => Ok(()),
        Err(e) => Err(Error::io(format!("wait for virsh, monitor {monitor}"))(e)),
    }
}

/// JSON in characters that virsh's command line takes as they are between single quotes.
pub(super) fn plain(json: &str) -> String {
    let mut text = String::with_capacity(json.len());
    let mut units = [0u16; 2];
    for c in json.chars() {
        match c {
            ' '..='~' if c != '\'' => text.push(c),
            // Only strings hold such characters.
            _ => {
                text.extend(c.encode_utf16(&mut units).iter().map(|unit| format!("\\u{unit:04x}")));
            }
        }
    }
    text
}

/// The answer in what virsh printed: the first line that is an object with a result.
pub(super) fn answer(said: &str) -> Option<serde_json::Map<String, Value>> {
    said.lines()
        .filter(|line| line.starts_with('{'))
        .filter_map(|line| serde_json::from_str::<serde_json::Map<String, Value>>(line).ok())
        .find(|object| object.contains_key("return") || object.contains_key("error"))
}

/// `event STOP at 1795246259.264615 for domain 'kf': <null>` as QMP words it; `None` for another
/// line.
pub(super) fn event(line: &str) -> Option<Value> {
    let (name, rest) = line.trim().strip_prefix("event ")?.split_once(" at ")?;
    let (time, rest) = rest.split_once(" for domain ")?;
    let (seconds, micros) = time.split_once('.')?;
    let stamp = json!({ "seconds": seconds.parse::<i64>().ok()?, "microseconds": micros.parse::<i64>().ok()? });
    let mut event = json!({ "event": name, "timestamp": stamp });
    let data =
        rest.split_once("': ").and_then(|(_, data)| serde_json::from_str::<Value>(data).ok());
    if let (Some(data), Some(object)) = (data, event.as_object_mut()) {
        object.insert("data".into(), data);
    }
    Some(event)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_answer_is_found_between_what_virsh_repeats() {
        let said = "virsh # qemu-monitor-command --domain 'x' '{\"execute\":\"a\"}'\n{\"return\":{\"x\":1},\"id\":\"libvirt-9\"}\n\nvirsh # echo \"KF\"\"END\"\nKFEND";
        assert_eq!(answer(said).unwrap()["return"]["x"], 1);
        let wrapped = "virsh # qemu-monitor-command 'x' '\n{\"execute\":\"a\",\"return\":1}'\n{\"error\":{\"desc\":\"no\"}}\n";
        assert_eq!(answer(wrapped).unwrap()["error"]["desc"], "no");
        assert_eq!(answer("virsh # \nerror: failed\n{}\n"), None);
    }

    #[test]
    fn events_are_read_with_qemus_own_time() {
        let stop = event("event STOP at 1795246259.064615 for domain 'kf': <null>\n").unwrap();
        assert_eq!(
            stop,
            json!({ "event": "STOP", "timestamp": { "seconds": 1_795_246_259, "microseconds": 64_615 } })
        );
        let down = event(
            "event SHUTDOWN at 1.000002 for domain 'a b': {\"guest\":true,\"reason\":\"guest-shutdown\"}",
        );
        assert_eq!(down.unwrap()["data"]["reason"], "guest-shutdown");
        for line in [
            "",
            "3",
            "event loop interrupted",
            "event X at y.z for domain 'a': <null>",
            "events received: 1",
        ] {
            assert_eq!(event(line), None, "{line}");
        }
    }

    #[test]
    fn a_name_that_would_be_another_command_is_refused() {
        for name in ["", "a'b", "a\nquit", "a\\"] {
            let error = Virsh::connect(name, None, &[]).err().unwrap();
            assert!(matches!(error, Error::Libvirt { .. }), "{error}");
        }
    }

    proptest! {
        /// What virsh reads is the same JSON, in characters that its command line leaves alone.
        #[test]
        fn requests_arrive_as_they_were(text in ".{0,40}") {
            let message = json!({ "execute": text, "x": "it's\n" });
            let line = plain(&message.to_string());
            prop_assert!(line.bytes().all(|b| (b' '..=b'~').contains(&b) && b != b'\''));
            prop_assert_eq!(serde_json::from_str::<Value>(&line).unwrap(), message);
        }

        #[test]
        fn no_output_panics(text in "(event |STOP| at |1|\\.|for domain|': |[{}\"':a ]){0,20}") {
            let _ = event(&text);
            let _ = answer(&text);
        }
    }
}
