/* PID 1 of the small guest: starts the workloads named by kf.work, prints their counters, obeys console commands.
 *
 *   boot -> fork workers -> all ready: "KF READY <work> up=<s>" -> every second: report lines; any time: commands
 *
 * A worker that dies is reported once with KF ERROR and not started again: its death is what a test must see.
 */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/reboot.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "kfguest.h"

#define WORKLOADS_MAX 8
#define WORKERS_MAX 64

static const struct workload *const all[] = {
    &work_compile, &work_compute, &work_dirty, &work_disk,    &work_hash,
    &work_journal, &work_ledger, &work_net,     &work_peer,  &work_scribble, &work_web,
};

struct running {
    const struct workload *work;
    struct slot *slots;
    uint32_t workers;
};

static struct running running[WORKLOADS_MAX];
static size_t running_count;
static struct slot *slots;
static size_t slot_count;
static double ready_at;

struct shared *shared;

static const struct workload *find_workload(const char *name)
{
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        if (strcmp(all[i]->name, name) == 0)
            return all[i];
    return NULL;
}

static void start_worker(const struct workload *work, struct slot *slot, uint32_t worker, uint32_t workers)
{
    slot->worker = worker;
    slot->workers = workers;
    slot->pid = fork();
    if (slot->pid < 0)
        die(work->name, "fork: %s", strerror(errno));
    if (slot->pid > 0)
        return;
    if (workers > 1) {
        /* One worker a vCPU; where the guest has fewer, they share. */
        cpu_set_t set;
        long cpus = sysconf(_SC_NPROCESSORS_ONLN);
        CPU_ZERO(&set);
        CPU_SET(worker % (cpus > 0 ? (uint32_t)cpus : 1), &set);
        sched_setaffinity(0, sizeof set, &set);
    }
    work->run(slot);
    die(work->name, "the workload returned");
}

static void start(const char *name)
{
    if (strcmp(name, "idle") == 0)
        return;
    const struct workload *work = find_workload(name);
    if (!work)
        die("boot", "kf.work names no workload: %s", name);
    if (running_count == WORKLOADS_MAX)
        die("boot", "kf.work names more than %d workloads", WORKLOADS_MAX);
    long cpus = sysconf(_SC_NPROCESSORS_ONLN);
    uint32_t workers = 1;
    if (work->per_cpu)
        workers = (uint32_t)param_number(name, "cpus", cpus > 0 ? (uint64_t)cpus : 1, 1, WORKERS_MAX);
    if (slot_count + workers > WORKERS_MAX)
        die("boot", "more than %d workers", WORKERS_MAX);
    struct running *entry = &running[running_count++];
    *entry = (struct running){.work = work, .slots = &slots[slot_count], .workers = workers};
    slot_count += workers;
    if (work->prepare)
        work->prepare();
    for (uint32_t i = 0; i < workers; i++)
        start_worker(work, &entry->slots[i], i, workers);
}

static void report(const struct running *entry, const char *prefix)
{
    char line[256];
    int length = snprintf(line, sizeof line, "%s%s", prefix, entry->work->name);
    if (entry->work->with_time)
        length += snprintf(line + length, sizeof line - (size_t)length, " t=%.3f", now() - ready_at);
    for (int c = 0; c < COUNTERS_MAX && entry->work->counter[c]; c++) {
        uint64_t sum = 0;
        for (uint32_t i = 0; i < entry->workers; i++)
            sum += atomic_load_explicit(&entry->slots[i].counter[c], memory_order_relaxed);
        length += snprintf(line + length, sizeof line - (size_t)length, " %s=%llu", entry->work->counter[c],
                           (unsigned long long)sum);
    }
    say("%s", line);
}

static void reap(void)
{
    int status;
    for (pid_t pid; (pid = waitpid(-1, &status, WNOHANG)) > 0;)
        for (size_t i = 0; i < running_count; i++)
            for (uint32_t w = 0; w < running[i].workers; w++) {
                if (running[i].slots[w].pid != pid)
                    continue;
                if (WIFSIGNALED(status))
                    error(running[i].work->name, "worker %u killed by signal %d", w, WTERMSIG(status));
                else
                    error(running[i].work->name, "worker %u ended with status %d", w, WEXITSTATUS(status));
            }
}

static bool all_ready(void)
{
    for (size_t i = 0; i < slot_count; i++)
        if (atomic_load(&slots[i].ready) == 0)
            return false;
    return true;
}

void wait_for_go(struct slot *slot)
{
    atomic_store(&slot->ready, 1);
    while (atomic_load(&shared->go) == 0)
        sleep_us(1000);
}

static void end_machine(const char *word, int how)
{
    /* A worker that saw the devices go would report it as a fault of the machine. */
    kill(-1, SIGKILL);
    say("KF %s", word);
    /* Lets the line leave the serial port before the machine goes. */
    sleep_us(50000);
    sync();
    reboot(how);
    error(word, "reboot system call: %s", strerror(errno));
}

static void command(char *line)
{
    char *rest = strchr(line, ' ');
    if (rest)
        *rest++ = 0;
    if (strcmp(line, "ping") == 0) {
        say("pong %s", rest ? rest : "");
    } else if (strcmp(line, "state") == 0) {
        for (size_t i = 0; i < running_count; i++)
            report(&running[i], "state ");
        say("state end up=%.2f", now());
    } else if (strcmp(line, "rate") == 0) {
        char *end = rest;
        unsigned long long rate = rest ? strtoull(rest, &end, 10) : 0;
        if (!rest || end == rest || *end)
            say("rate wants a number of pages per second");
        else {
            atomic_store(&shared->dirty_rate, rate);
            say("rate %llu", rate);
        }
    } else if (strcmp(line, "reboot") == 0) {
        end_machine("REBOOT", RB_AUTOBOOT);
    } else if (strcmp(line, "poweroff") == 0) {
        end_machine("POWEROFF", RB_POWER_OFF);
    } else if (strcmp(line, "panic") == 0) {
        int fd = open("/proc/sysrq-trigger", O_WRONLY | O_CLOEXEC);
        if (fd < 0 || write(fd, "c", 1) != 1)
            error("panic", "writing /proc/sysrq-trigger: %s", strerror(errno));
        if (fd >= 0)
            close(fd);
    } else if (*line) {
        say("unknown command: %s (ping, state, rate, reboot, poweroff, panic)", line);
    }
}

void serve(const char *work)
{
    bool ready = false;
    /* CPU-bound workers must not keep PID 1 from answering. */
    setpriority(PRIO_PROCESS, 0, -10);
    for (double next = now() + 1;;) {
        reap();
        if (work && !ready && all_ready()) {
            ready = true;
            ready_at = now();
            say("KF READY %s up=%.2f", work, ready_at);
            atomic_store(&shared->go, 1);
            next = ready_at + 1;
        }
        double left = next - now();
        int wait_ms = left <= 0 ? 0 : (int)(left * 1000) + 1;
        struct pollfd input = {.fd = console_fd(), .events = POLLIN};
        int events = poll(&input, 1, !ready && wait_ms > 5 ? 5 : wait_ms);
        if (events > 0 && input.revents & POLLIN) {
            for (char *line; (line = console_line());)
                command(line);
        } else if (events > 0) {
            sleep_us(100000); /* hung up: no reason to spin */
        }
        if (now() < next)
            continue;
        for (size_t i = 0; ready && i < running_count; i++)
            if (running[i].work->every_second)
                report(&running[i], "");
        /* After being held up: from here on, no burst of late lines. */
        next = next + 1 > now() ? next + 1 : now() + 1;
    }
}

int main(int argc, char **argv)
{
    if (argc == 4 && strcmp(argv[1], "--compile-job") == 0)
        return compile_job(argv + 2);

    console_open();
    params_load();
    size_t bytes = sizeof *shared + WORKERS_MAX * sizeof *slots;
    shared = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (shared == MAP_FAILED)
        die("boot", "mapping the counters: %s", strerror(errno));
    slots = (struct slot *)(shared + 1);

    const char *work = param("boot", "work", "idle");
    char *names = strdup(work);
    if (!names)
        die("boot", "out of memory");
    for (char *name = strtok(names, "+"); name; name = strtok(NULL, "+"))
        start(name);
    serve(work);
}
