/* The serial console: whole lines out, command lines in. Lines end in CR LF, as the tty driver writes them. */
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <termios.h>
#include <unistd.h>

#include "kfguest.h"

static int fd = -1;

void console_open(void)
{
    fd = open("/dev/console", O_RDWR | O_NOCTTY | O_CLOEXEC);
    if (fd < 0)
        _exit(1);
    /* Without echo what the guest prints is the guest's alone. Canonical mode hands over whole lines. */
    struct termios mode;
    if (tcgetattr(fd, &mode) == 0) {
        mode.c_lflag &= ~(tcflag_t)(ECHO | ECHONL | ECHOE | ECHOK | ISIG);
        mode.c_lflag |= ICANON;
        mode.c_iflag |= ICRNL;
        tcsetattr(fd, TCSANOW, &mode);
    }
    fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK);
}

int console_fd(void) { return fd; }

static void put(const char *line, size_t length)
{
    /* The tty takes a whole line at once unless its buffer is full. */
    for (size_t done = 0; done < length;) {
        ssize_t wrote = write(fd, line + done, length - done);
        if (wrote > 0)
            done += (size_t)wrote;
        else if (wrote < 0 && errno == EAGAIN)
            sleep_us(1000);
        else if (wrote < 0 && errno != EINTR)
            return;
    }
}

static void vsay(const char *prefix, const char *what, const char *format, va_list arguments)
{
    char line[512];
    size_t length = 0;
    if (what)
        length = (size_t)snprintf(line, sizeof line - 1, "%s%s: ", prefix, what);
    int more = vsnprintf(line + length, sizeof line - 1 - length, format, arguments);
    length += more > 0 ? (size_t)more : 0;
    if (length > sizeof line - 2)
        length = sizeof line - 2;
    line[length++] = '\n';
    put(line, length);
}

void say(const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    vsay("", NULL, format, arguments);
    va_end(arguments);
}

void error(const char *what, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    vsay("KF ERROR ", what, format, arguments);
    va_end(arguments);
}

void die(const char *what, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    vsay("KF ERROR ", what, format, arguments);
    va_end(arguments);
    if (getpid() == 1)
        serve(NULL);
    _exit(1);
}

char *console_line(void)
{
    static char line[256];
    ssize_t got = read(fd, line, sizeof line - 1);
    if (got <= 0)
        return NULL;
    line[got] = 0;
    line[strcspn(line, "\r\n")] = 0;
    return line;
}
