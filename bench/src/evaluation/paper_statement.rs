//! The values in the paper's text and tables, by figure and table. Figures for which the text gives
//! no value are missing.
//!
//! The paper's guest: 1 GiB, one processor, under KVM, 10 minutes of each workload, intervals of 2 s
//! unless the entry says otherwise.

/// Figures and tables with their values.
const STATEMENTS: [(&str, &str); 19] = [
    ("3.4", "L_opt(1) 57 s, L_opt(32) 1.8 s; N_demand is 0 at 32.3 nodes"),
    (
        "6.2",
        "kernel build 21,710 pages; Bonnie++ 89,500 (up to 224,400); STREAM 8,900 (up to 14,120)",
    ),
    ("6.3", "kernel build 29 sectors; Bonnie++ 4,000 (up to 13,770); STREAM next to none"),
    ("6.4", "grows less than the interval; Bonnie++ most"),
    ("6.5", "Bonnie++ about linear in the interval"),
    ("T6.3", "kernel build 7,281,163,691; Bonnie++ 3,091,970,490; STREAM 5,253,607,823"),
    (
        "T6.4",
        "RAM, boot / first pass / rest: kernel build 24 / 17 %; Bonnie++ 23 / 67 / 74 %; STREAM 21 / 74 / 86 %. Disk: 64 / 76 %; 78 / 99 / 97 %; 78 / 89 / 93 %",
    ),
    ("6.6", "a large part of the disk's sectors against RAM"),
    ("6.7", "no clear correlation with the interval"),
    ("6.8", "no clear correlation with the interval"),
    (
        "T6.5",
        "kernel build 4,320 KiB (RAM map 4,130, disk map 111, devices 79); Bonnie++ 5,271 KiB; STREAM 4,225 KiB",
    ),
    ("6.9", "less with longer intervals; Bonnie++ less than kernel build"),
    ("6.10", "kernel build 44 ms; STREAM about half; Bonnie++ up to 5 s"),
    ("A.6", "44 ms, immediate and deferred"),
    ("6.11", "less than the interval"),
    ("A.7", "hashing 70 %, looking up and writing 20 %, maps 10 %"),
    ("6.12", "immediate about 100 ms; deferred mostly more, up to 10 s"),
    ("6.13", "1 GiB each time over 10 Gbit/s: 2.5 s at least, 3.5 s in the mean, 7 s at most"),
    (
        "6.15",
        "3.9 with 4 nodes and long intervals (a slowdown of 31, by waiting), as the model says",
    ),
];

/// Returns the paper's values for figure or table `number`; an empty text if there are none.
pub fn paper_statement(number: &str) -> &'static str {
    STATEMENTS.iter().find(|(known, _)| *known == number).map_or("", |(_, statement)| statement)
}
