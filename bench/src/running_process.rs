//! A process that ends with the value that holds it, and the lines that it prints.

use crate::Error;
use crate::running_guest::AwaitedLine;
use std::io::{BufRead, BufReader, Read};
use std::process::Child;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

/// Longest time for a process to end.
const END_TIMEOUT: Duration = Duration::from_secs(20);

/// A process that is asked to end when this is dropped, and killed if it does not end.
pub struct RunningProcess(pub Child);

/// The lines of a process's output, with their times.
pub type Lines = Receiver<AwaitedLine>;

impl Drop for RunningProcess {
    fn drop(&mut self) {
        if let Some(pid) = i32::try_from(self.0.id()).ok().and_then(rustix::process::Pid::from_raw)
        {
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
        }
        let deadline = Instant::now() + END_TIMEOUT;
        while Instant::now() < deadline {
            if matches!(self.0.try_wait(), Ok(Some(_))) {
                return;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Collects the lines of `output` in a thread, which ends with the output.
pub fn collect_lines(output: impl Read + Send + 'static) -> Lines {
    let (send, lines) = channel();
    std::thread::spawn(move || {
        let lines = BufReader::new(output).lines().map_while(Result::ok);
        let lines = lines.map(|text| AwaitedLine { at: Instant::now(), text });
        lines.into_iter().try_for_each(|line| send.send(line))
    });
    lines
}

/// Waits at most `timeout` for each next line, until one contains `text`. Returns its time since
/// `started` in ns, and the line.
pub fn wait_for_line(
    lines: &Lines,
    started: Instant,
    text: &str,
    timeout: Duration,
) -> Result<(f64, String), Error> {
    let mut before = Vec::new();
    loop {
        match lines.recv_timeout(timeout) {
            Ok(line) if line.text.contains(text) => {
                return Ok((line.at.duration_since(started).as_nanos() as f64, line.text));
            }
            Ok(line) => before.push(line.text),
            Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => {
                return Err(Error::failed(format!("wait for {text:?}"), before.join("; ")));
            }
        }
    }
}

/// Returns the time after `text` in `line` (for example `1.73 ms`), in nanoseconds.
pub fn time_after(line: &str, text: &str) -> Result<f64, Error> {
    let parse = || {
        let (_, rest) = line.split_once(text)?;
        let mut words = rest.split_whitespace();
        let value: f64 = words.next()?.parse().ok()?;
        let unit = match words.next()?.trim_end_matches(',') {
            "us" => 1e3,
            "ms" => 1e6,
            "s" => 1e9,
            _ => return None,
        };
        Some(value * unit)
    };
    parse().ok_or_else(|| Error::failed(format!("read the time after {text:?}"), line))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_is_read_in_each_unit() {
        let line = |time| {
            format!("keyframe: ... is running after 2.0 s, its RAM filled in {time} (QEMU 77)")
        };
        for (time, ns) in [("850 us", 850e3), ("1.73 ms", 1.73e6), ("2.4 s", 2.4e9)] {
            let line = line(time);
            assert!((time_after(&line, "RAM filled in").unwrap() - ns).abs() < 1.0, "{time}");
            assert!((time_after(&line, "is running after").unwrap() - 2e9).abs() < 1.0, "{time}");
        }
        assert!(time_after("is running after 2.0 s (QEMU 77)", "RAM filled in").is_err());
    }
}
