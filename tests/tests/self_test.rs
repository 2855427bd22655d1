//! `keyframe doctor --self-test`: every strategy and every way back is exact on this machine.

use keyframe_tests::{Qemu, TestEnv, chosen_qemus, distribution_qemu, needs_kvm, number};
use serde_json::Value;

/// Runs the self-test, which must find all exact. Returns the names of its exact checks.
fn exact_checks(env: &TestEnv, qemu: &Qemu, accelerator: &str) -> Vec<String> {
    let words = ["doctor", "--self-test", "--json", "--qemu", &qemu.path, "--accel", accelerator];
    let report = env.json(&words);
    assert_eq!(report["exact"], true, "{report:#}");
    assert!(report["version"].as_str().is_some_and(|version| version.contains('.')));
    let checks = report["checks"].as_array().expect("checks");
    let is_exact = |check: &&Value| check["outcome"] == "exact" && number(check, "duration_ns") > 0;
    let name =
        |check: &Value| format!("{} {}", check["area"].as_str()?, check["name"].as_str()?).into();
    checks.iter().filter(is_exact).filter_map(name).collect()
}

const EVERYWHERE: &[&str] = &[
    "capture strategy precopy",
    "capture strategy pre-scan",
    "capture strategy stop-copy",
    "capture strategy cow",
    "capture strategy fork",
    "capture strategy compare",
    "capture RAM in private memory backend",
    "capture RAM in shared memfd",
    "capture RAM in shared file",
    "restore rollback in place",
    "restore eager",
    "restore lazy",
    "restore branch",
    "restore running on",
];

#[test]
fn all_is_exact_here() {
    for qemu in chosen_qemus(0) {
        let env = TestEnv::without_store();
        let checks = exact_checks(&env, &qemu, "tcg");
        for name in EVERYWHERE.iter().chain(&["recording record and verify", "recording analyze"]) {
            assert!(checks.iter().any(|check| check == name), "{name}: {checks:?}");
        }
        let words = ["doctor", "--self-test", "--qemu", "/bin/true"];
        env.refused(&words, 1, &["/bin/true", "as QEMU's system emulator does", "fix:"]);
    }
}

#[test]
fn all_is_exact_here_under_kvm() {
    needs_kvm!();
    let checks = exact_checks(&TestEnv::without_store(), &distribution_qemu(), "kvm");
    for name in EVERYWHERE {
        assert!(checks.iter().any(|check| check == name), "{name}: {checks:?}");
    }
}
