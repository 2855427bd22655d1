//! Tests against programs that answer as Slurm's do. The end-to-end tests use the real ones.

use super::*;
use crate::{Placement, Preference, QueueItem};
use std::os::unix::fs::PermissionsExt;

struct Fake {
    dir: tempfile::TempDir,
}

impl Fake {
    fn new() -> Self {
        let fake = Self { dir: tempfile::tempdir().unwrap() };
        fake.program(SCONTROL, "echo 'MaxArraySize            = 4'");
        fake.program(SINFO, "printf 'main*|5|idle\\nmain*|1|down*\\nother|9|idle\\n'");
        fake.program(SQUEUE, "cat tasks 2>/dev/null || true");
        fake.program(SCANCEL, "echo \"$@\" >> cancelled");
        // Job ids from 10 on; the script and the arguments are kept.
        fake.program(
            SBATCH,
            "echo \"$@\" >> asked; cat > script; n=$(wc -l < asked); echo $((9 + n))",
        );
        fake
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn text(&self, name: &str) -> String {
        fs::read_to_string(self.path(name)).unwrap_or_default()
    }

    fn program(&self, name: &str, body: &str) {
        let path = self.path(name);
        fs::write(&path, format!("#!/bin/sh\ncd '{}'\n{body}\n", self.dir.path().display()))
            .unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    }

    fn slurm(&self, pilots: Option<u32>) -> SlurmRunner {
        let options = SlurmOptions {
            partition: None,
            pilots,
            limit: Some(3),
            slots: 1,
            memory_mib: 700,
            time: Some("10".into()),
            more: vec!["--account=theirs".into()],
            command: ["/bin/it's", "__work"].map(OsString::from).into(),
            name: "keyframe-icount".into(),
            dir: self.path("slurm"),
        };
        SlurmRunner::new(options, SlurmPrograms { dir: Some(self.dir.path().into()) }).unwrap()
    }

    fn queue(&self, items: u32) -> Queue {
        let queue = Queue::create(&self.path("queue")).unwrap();
        (0..items).for_each(|index| queue.add(QueueItem { index, weight: 1 }).unwrap());
        queue.close().unwrap();
        queue
    }
}

#[test]
fn arrays_are_split_and_ask_for_what_they_need() {
    let fake = Fake::new();
    let queue = fake.queue(100);
    let mut slurm = fake.slurm(Some(10));
    slurm.tend(&queue).unwrap();
    assert_eq!(slurm.jobs(), [10, 11, 12]);
    let asked = fake.text("asked");
    let arrays: Vec<&str> = asked
        .lines()
        .filter_map(|line| line.split(' ').find(|w| w.starts_with("--array")))
        .collect();
    assert_eq!(arrays, ["--array=0-3%3", "--array=0-3%3", "--array=0-1%3"]);
    for word in [
        "--parsable",
        "--requeue",
        "--mem=700M",
        "--cpus-per-task=1",
        "--time=10",
        "--account=theirs",
    ] {
        assert!(asked.contains(word), "{asked}");
    }
    assert_eq!(fake.text("script"), "#!/bin/sh\nexec '/bin/it'\\''s' '__work'\n");
    // A new runner continues with them.
    assert_eq!(fake.slurm(None).jobs(), [10, 11, 12]);
}

#[test]
fn a_pilot_for_each_node_but_no_more_than_items() {
    for (items, array) in [(100, "--array=0-3%3"), (2, "--array=0-1%3")] {
        let fake = Fake::new();
        let queue = fake.queue(items);
        fake.slurm(None).tend(&queue).unwrap();
        assert!(
            fake.text("asked")
                .starts_with(&format!("--parsable --job-name=keyframe-icount {array}"))
        );
        assert_eq!(fake.text("asked").lines().count(), if items > 4 { 2 } else { 1 });
    }
}

#[test]
fn fewer_pilots_are_submitted_if_the_account_is_limited() {
    let fake = Fake::new();
    let refuse = "case \"$*\" in *--array=0-0*) ;; *) echo 'Batch job submission failed: Job violates accounting/QOS policy (job submit limit, user size and/or time limits)' >&2; exit 1;; esac";
    fake.program(
        SBATCH,
        &format!(
            "{refuse}; [ -e one ] && {{ echo 'submit limit' >&2; exit 1; }}; touch one; echo 7"
        ),
    );
    let mut slurm = fake.slurm(Some(8));
    slurm.tend(&fake.queue(100)).unwrap();
    assert_eq!(slurm.jobs(), [7]);
}

#[test]
fn items_return_to_the_queue_when_their_task_does_not_run() {
    let fake = Fake::new();
    let queue = fake.queue(4);
    let mut slurm = fake.slurm(Some(2));
    slurm.tend(&queue).unwrap();
    let variables = |task: &'static str, restarts: &'static str| {
        move |name: &str| match name {
            "SLURM_ARRAY_JOB_ID" => Some("10".to_owned()),
            "SLURM_ARRAY_TASK_ID" => Some(task.to_owned()),
            "SLURM_RESTART_COUNT" => Some(restarts.to_owned()),
            _ => None,
        }
    };
    let [lost, alive] = ["0", "1"].map(|task| SlurmRunner::worker_id(variables(task, "0")));
    for worker in [&lost, &alive] {
        queue.take(worker, Placement::Neighbours, Preference::default()).unwrap().unwrap();
    }
    fs::write(fake.path("tasks"), "10|0|PENDING||BeginTime\n10|1|RUNNING|n2|None\n").unwrap();
    slurm.asked = None;
    slurm.tend(&queue).unwrap();
    let taken = queue.taken().unwrap();
    assert_eq!(taken.iter().map(|taken| &taken.worker).collect::<Vec<_>>(), [&alive]);
    assert_eq!((slurm.pilot_states().running, slurm.pilot_states().waiting), (1, 1));
    let again = SlurmRunner::worker_id(variables("0", "1"));
    assert!(
        SlurmRunner::is_earlier_start(&again, &lost)
            && !SlurmRunner::is_earlier_start(&again, &alive)
    );
}

#[test]
fn pilots_without_progress_are_an_error() {
    let fake = Fake::new();
    let queue = fake.queue(4);
    let mut slurm = fake.slurm(Some(1));
    for _ in 0..ROUNDS_MAX {
        slurm.tend(&queue).unwrap();
        slurm.asked = None;
    }
    fs::write(fake.path("slurm/12_0.log"), "keyframe: no such directory\n").unwrap();
    let error = slurm.tend(&queue).unwrap_err().to_string();
    assert!(error.contains("no such directory") && error.contains("3 times"), "{error}");
    slurm.end(&queue).unwrap();
    assert_eq!(fake.text("cancelled"), "--quiet 10 11 12\n");
    // All have ended: the real scancel fails silently then.
    fake.program(SCANCEL, "exit 1");
    slurm.end(&queue).unwrap();
    fs::write(fake.path("tasks"), "10|0|RUNNING|n1|None\n").unwrap();
    assert!(matches!(slurm.end(&queue).unwrap_err(), Error::Refused { .. }));
}

#[test]
fn a_controller_that_does_not_answer_at_once_is_asked_again() {
    let fake = Fake::new();
    let silent_once = |message: &str, then: &str| {
        format!("if mkdir silent; then echo '{message}' >&2; exit 1; fi; {then}")
    };
    let message = "slurm_load_jobs error: Zero Bytes were transmitted or received";
    let programs = SlurmPrograms { dir: Some(fake.dir.path().into()) };
    fake.program(SQUEUE, &silent_once(message, "echo tasks"));
    assert_eq!(programs.ask(SQUEUE, &[""; 0], &[]).unwrap(), "tasks\n");
    // The job may have been submitted.
    fs::remove_dir(fake.path("silent")).unwrap();
    fake.program(SBATCH, &silent_once(message, "echo 7"));
    assert!(matches!(programs.ask(SBATCH, &[""; 0], &[]), Err(Error::Refused { .. })));
    fs::remove_dir(fake.path("silent")).unwrap();
    let connect = "Unable to contact slurm controller (connect failure)";
    fake.program(SBATCH, &silent_once(&format!("Connection refused; {message}"), "echo 7"));
    assert!(matches!(programs.ask(SBATCH, &[""; 0], &[]), Err(Error::Refused { .. })));
    fs::remove_dir(fake.path("silent")).unwrap();
    fake.program(SBATCH, &silent_once(connect, "echo 7"));
    assert_eq!(programs.ask(SBATCH, &[""; 0], &[]).unwrap(), "7\n");
}

#[test]
fn missing_and_failing_programs_are_errors_with_a_fix() {
    let fake = Fake::new();
    let queue = fake.queue(1);
    fake.program(SBATCH, "echo 'sbatch: error: invalid partition specified: main' >&2; exit 1");
    let error = fake.slurm(Some(1)).tend(&queue).unwrap_err();
    assert!(
        error.to_string().contains("invalid partition") && error.fix().unwrap().contains("sinfo"),
        "{error}"
    );
    fake.program(SBATCH, "echo nonsense");
    assert!(matches!(fake.slurm(Some(1)).tend(&queue).unwrap_err(), Error::Answer { .. }));
    fs::remove_file(fake.path(SBATCH)).unwrap();
    let error = fake.slurm(Some(1)).tend(&queue).unwrap_err();
    assert!(error.fix().unwrap().contains("slurm-client"), "{error}");
}
