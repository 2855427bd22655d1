//! Tests the example of the crate `keyframe-session`: a program that runs a VM under checkpoints
//! without the binary `keyframe`.

use keyframe_tests::{Boot, Process, Sequence, TestEnv, hash_lines};

const CHECKPOINTS: usize = 3;
/// Lines that a restored guest prints before it is checked.
const LINES: usize = 10;

#[test]
fn the_example_takes_checkpoints_that_restore() {
    // Other tests at the same time could make a pause exceed its default limit.
    let env = TestEnv::exclusive();
    let boot = Boot::new("hash");
    let mut command = env.example("checkpoint_vm", &[&env.store(), &CHECKPOINTS.to_string()]);
    command.args(boot.command());
    let mut run = Process::start(command);
    assert!(run.wait().success(), "{}", run.report());
    let summary = format!("sealed {CHECKPOINTS}, failed 0");
    assert!(run.lines().iter().any(|line| line.contains(&summary)), "{}", run.report());

    assert_eq!(env.list().len(), CHECKPOINTS);
    env.ok(&["check", "--read-data", "--quiet", "--store", &env.store()]);
    let mut restored = env.restore("latest", &[]);
    let lines = restored.wait_until(|vm| {
        let lines = hash_lines(&vm.lines());
        (lines.len() >= LINES).then_some(lines)
    });
    let lines = lines.unwrap_or_else(|| panic!("the guest stops; {}", restored.report()));
    Sequence::new(16).check(&lines, LINES);
}
