/* Parameters: the words of the kernel command line that begin with `kf.`. */
#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "kfguest.h"

static char cmdline[4096];
static const char *words[128];
static size_t word_count;

void params_load(void)
{
    int fd = open("/proc/cmdline", O_RDONLY | O_CLOEXEC);
    ssize_t got = fd < 0 ? -1 : read(fd, cmdline, sizeof cmdline - 1);
    if (got < 0)
        die("boot", "reading /proc/cmdline: %s", strerror(errno));
    close(fd);
    cmdline[got] = 0;
    /* Any white space separates, as for the kernel: run.sh --print uses form feeds. */
    for (char *at = cmdline; *at && word_count < sizeof words / sizeof *words;) {
        while (isspace((unsigned char)*at))
            *at++ = 0;
        if (!*at)
            break;
        if (strncmp(at, "kf.", 3) == 0)
            words[word_count++] = at + 3;
        while (*at && !isspace((unsigned char)*at))
            at++;
    }
}

/* The last value given for `key`, as the kernel has it for its own. */
static const char *find(const char *key)
{
    size_t length = strlen(key);
    for (size_t i = word_count; i-- > 0;)
        if (strncmp(words[i], key, length) == 0 && words[i][length] == '=')
            return words[i] + length + 1;
    return NULL;
}

const char *param(const char *work, const char *name, const char *otherwise)
{
    char key[64];
    snprintf(key, sizeof key, "%s.%s", work, name);
    const char *value = find(key);
    if (!value)
        value = find(name);
    return value ? value : otherwise;
}

uint64_t param_number(const char *work, const char *name, uint64_t otherwise, uint64_t min, uint64_t max)
{
    const char *text = param(work, name, NULL);
    if (!text)
        return otherwise;
    char *end;
    errno = 0;
    unsigned long long value = strtoull(text, &end, 10);
    if (!isdigit((unsigned char)*text) || *end || errno || value < min || value > max)
        die(work, "kf.%s=%s is not a number from %llu to %llu", name, text, (unsigned long long)min, (unsigned long long)max);
    return value;
}
