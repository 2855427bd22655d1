/* `compile`: what a compiler run does to a machine: processes started and ended, small files, sorting, allocation, pipes.
 *
 *   round n:  4 jobs at once, each a fork and an exec of this program:
 *             numbers -> 16 text files on tmpfs -> read back -> nodes on the heap -> sort -> pipe -> parent
 *
 * The numbers of job j in round n are mix(GOLDEN * ((n * 4 + j) * 4096 + i + 1)), i in 0..4096, so the parent knows the sum
 * that has to come out: the round's sum is the wrapping sum of mix(number) over all jobs.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "hash.h"
#include "kfguest.h"

#define JOBS 4
#define FILES 16
#define NUMBERS 4096
#define NUMBERS_PER_FILE (NUMBERS / FILES)
#define WORK_DIR "/tmp/kf"

static uint64_t number(uint64_t round, uint64_t job, uint64_t i)
{
    return hash_mix(HASH_GOLDEN * ((round * JOBS + job) * NUMBERS + i + 1));
}

static void file_name(char *name, size_t size, const char *round, const char *job, int file)
{
    snprintf(name, size, WORK_DIR "/%s-%s-%d.txt", round, job, file);
}

static bool write_files(const char *round, const char *job)
{
    uint64_t r = strtoull(round, NULL, 10), j = strtoull(job, NULL, 10);
    for (int file = 0; file < FILES; file++) {
        char name[64];
        file_name(name, sizeof name, round, job, file);
        FILE *out = fopen(name, "w");
        if (!out)
            return false;
        for (uint64_t i = 0; i < NUMBERS_PER_FILE; i++)
            fprintf(out, "%llu\n", (unsigned long long)number(r, j, (uint64_t)file * NUMBERS_PER_FILE + i));
        if (fclose(out) != 0)
            return false;
    }
    return true;
}

/* A number on the heap, in an allocation of a size that the number chooses. */
struct node {
    uint64_t value;
    char padding[];
};

static bool read_files(const char *round, const char *job, struct node **nodes)
{
    int at = 0;
    for (int file = 0; file < FILES; file++) {
        char name[64];
        unsigned long long value;
        file_name(name, sizeof name, round, job, file);
        FILE *in = fopen(name, "r");
        if (!in)
            return false;
        while (at < NUMBERS && fscanf(in, "%llu", &value) == 1) {
            size_t padding = value % 500;
            nodes[at] = malloc(sizeof **nodes + padding);
            if (!nodes[at])
                return false;
            nodes[at]->value = value;
            memset(nodes[at]->padding, (int)(value & 0xFF), padding);
            at++;
        }
        fclose(in);
        unlink(name);
    }
    return at == NUMBERS;
}

static int by_value(const void *a, const void *b)
{
    const struct node *x = *(const struct node *const *)a, *y = *(const struct node *const *)b;
    return (x->value > y->value) - (x->value < y->value);
}

/* Writes the sorted numbers to standard output. Exit status 0 when all went well. */
int compile_job(char **arguments)
{
    static struct node *nodes[NUMBERS];
    if (!write_files(arguments[0], arguments[1]) || !read_files(arguments[0], arguments[1], nodes))
        return 2;
    qsort(nodes, NUMBERS, sizeof *nodes, by_value);
    for (int i = 0; i < NUMBERS; i++) {
        if (fwrite(&nodes[i]->value, sizeof nodes[i]->value, 1, stdout) != 1)
            return 3;
        free(nodes[i]);
    }
    return fclose(stdout) == 0 ? 0 : 3;
}

/* Starts a job; its numbers come out of the returned descriptor. */
static int start_job(uint64_t round, int job, pid_t *pid)
{
    int ends[2];
    char round_text[24], job_text[24];
    snprintf(round_text, sizeof round_text, "%llu", (unsigned long long)round);
    snprintf(job_text, sizeof job_text, "%d", job);
    if (pipe(ends) < 0)
        die("compile", "pipe: %s", strerror(errno));
    *pid = fork();
    if (*pid < 0)
        die("compile", "fork: %s", strerror(errno));
    if (*pid == 0) {
        dup2(ends[1], 1);
        close(ends[0]);
        close(ends[1]);
        execl("/proc/self/exe", "kfguest", "--compile-job", round_text, job_text, (char *)NULL);
        _exit(127);
    }
    close(ends[1]);
    return ends[0];
}

/* Adds up what a job sends; its end tells whether it was whole and in order. */
static uint64_t collect(uint64_t round, int job, int fd, pid_t pid)
{
    FILE *in = fdopen(fd, "r");
    uint64_t sum = 0, value, last = 0;
    int got = 0, status = 0;
    if (!in)
        die("compile", "fdopen: %s", strerror(errno));
    for (; fread(&value, sizeof value, 1, in) == 1; got++) {
        if (value < last)
            error("compile", "round %llu job %d: number %d is out of order", (unsigned long long)round, job, got);
        last = value;
        sum += hash_mix(value);
    }
    fclose(in);
    while (waitpid(pid, &status, 0) < 0 && errno == EINTR)
        continue;
    if (status != 0 || got != NUMBERS)
        error("compile", "round %llu job %d: %d of %d numbers, status %d", (unsigned long long)round, job, got, NUMBERS, status);
    return sum;
}

static void run(struct slot *slot)
{
    if (mkdir(WORK_DIR, 0700) < 0 && errno != EEXIST)
        die("compile", "mkdir %s: %s", WORK_DIR, strerror(errno));
    wait_for_go(slot);
    for (uint64_t round = 1;; round++) {
        pid_t pids[JOBS];
        int from[JOBS];
        uint64_t sum = 0, expected = 0;
        for (int job = 0; job < JOBS; job++)
            from[job] = start_job(round, job, &pids[job]);
        for (int job = 0; job < JOBS; job++) {
            sum += collect(round, job, from[job], pids[job]);
            for (uint64_t i = 0; i < NUMBERS; i++)
                expected += hash_mix(number(round, (uint64_t)job, i));
        }
        say("compile round=%llu sum=%016llx", (unsigned long long)round, (unsigned long long)sum);
        if (sum != expected)
            error("compile", "round %llu: sum %016llx, expected %016llx", (unsigned long long)round, (unsigned long long)sum,
                  (unsigned long long)expected);
        count(slot, 0, 1);
    }
}

const struct workload work_compile = {.name = "compile", .counter = {"rounds"}, .run = run};
