use crate::target::{PAGE, Target, scan};
#[test]
fn probe_zap_then_read() {
    for kind in ["anon", "copy", "memcopy"] {
        let mut target = Target::start();
        let ram = target.map(kind, 64 * PAGE);
        target.write(ram, 0, 64, 7);
        let tracker = target.track(ram);
        scan(&tracker, ram);
        target.on("zap", ram, 3, 2, "");
        target.content(ram);
        println!("{kind}: {:?}", scan(&tracker, ram));
    }
}
