/* What the workloads of the small guest share: counters, parameters, the console.
 *
 *   kfguest (PID 1)  console commands, one report line a second, KF READY, deaths
 *      |  fork                           shared: one `struct slot` per worker
 *      +-- worker of the first workload  -> counters, ready
 *      +-- worker of the second ...
 */
#ifndef KF_GUEST_H
#define KF_GUEST_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#define PAGE_BYTES 4096u
#define PAGE_WORDS 512u
#define COUNTERS_MAX 3

/* One worker's counters. Each sits on cache lines of its own; only its worker writes it. */
struct slot {
    _Atomic uint64_t counter[COUNTERS_MAX];
    _Atomic uint32_t ready;
    uint32_t worker, workers;
    pid_t pid;
} __attribute__((aligned(128)));

struct workload {
    const char *name;
    const char *counter[COUNTERS_MAX]; /* their names in report lines; NULL ends the list */
    bool every_second;                 /* PID 1 prints a report line each second */
    bool with_time;                    /* the line says t=<seconds since ready> */
    bool per_cpu;                      /* kf.cpus workers instead of one */
    void (*prepare)(void);             /* before the fork: shared memory; may be NULL */
    void (*run)(struct slot *);        /* never returns */
};

extern const struct workload work_compile, work_compute, work_dirty, work_disk, work_hash, work_journal, work_ledger, work_net,
    work_peer, work_scribble, work_web;

/* Shared by all processes of the guest. */
struct shared {
    _Atomic uint64_t dirty_rate; /* pages per second the dirty workload writes; the `rate` command changes it */
    _Atomic uint32_t go;         /* KF READY has been printed */
} __attribute__((aligned(128)));

extern struct shared *shared;

/* kfguest.c */
/* What a worker calls when it is set up: says so and returns once KF READY is printed. */
void wait_for_go(struct slot *slot);
/* PID 1's loop; with `work` NULL it only obeys commands, after an error that kept the guest from getting ready. */
void serve(const char *work) __attribute__((noreturn));

/* work_compile.c: the re-executed half of that workload; `arguments` are round and job. */
int compile_job(char **arguments);

/* console.c */
/* Prints one whole line, in one write. */
void say(const char *format, ...) __attribute__((format(printf, 1, 2)));
/* Prints a line with `KF ERROR <what>: ` before it; the guest goes on. */
void error(const char *what, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* error(), then this process ends with status 1; PID 1, whose end would be a kernel panic, goes on obeying commands. */
void die(const char *what, const char *format, ...) __attribute__((format(printf, 2, 3), noreturn));
void console_open(void);
int console_fd(void);
/* The next complete command line without its end, or NULL when none waits. Valid until the next call. */
char *console_line(void);

/* params.c */
void params_load(void);
/* The kernel parameter `kf.<work>.<name>`, else `kf.<name>`, else `otherwise`. */
const char *param(const char *work, const char *name, const char *otherwise);
/* The same as a whole number in min..max; anything else ends the worker with an error. */
uint64_t param_number(const char *work, const char *name, uint64_t otherwise, uint64_t min, uint64_t max);

/* memory.c */
double now(void);
void sleep_us(uint64_t us);
/* `mib` MiB of zeroed, page-aligned memory; ends the worker with an error when the guest has not that much free. */
void *map_mib(const char *work, uint64_t mib, bool shared);
/* A step from page to page that visits all of `pages` before any again. */
uint64_t stride_over(uint64_t pages);

/* answering.c */
struct service {
    const char *work;
    uint16_t port;
    uint64_t magic;
    size_t answer_max;
    size_t (*answer)(void *self, uint64_t value, uint8_t *out); /* gives back the answer's bytes */
    void (*count)(const void *self, struct slot *slot);         /* now and then */
};

/* Answers whoever connects, `service`'s way; says that it is set up. Never returns. */
void answer_clients(const struct service *service, void *self, struct slot *slot) __attribute__((noreturn));

static inline void count(struct slot *slot, int which, uint64_t by)
{
    atomic_store_explicit(&slot->counter[which],
                          atomic_load_explicit(&slot->counter[which], memory_order_relaxed) + by, memory_order_relaxed);
}

#endif
