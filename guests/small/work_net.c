/* `net`: sends self-checking blocks over TCP to an echo server at kf.net=HOST:PORT as fast as they come back, and
 * checks each. A connection that breaks or stands still for a few seconds is opened again and goes on with the block
 * after the last one that came back.
 *
 *   block, 4 KiB:  | NET_MAGIC | number | mix(GOLDEN * (number * 512 + i)) for i in 2..512 |
 *
 *   received <= sent <= received + WINDOW_BLOCKS
 */
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "hash.h"
#include "kfguest.h"

#define NET_MAGIC 0x306B636F6C62666Bull
#define BLOCK_BYTES 4096u
#define BLOCK_WORDS 512u
#define WINDOW_BLOCKS 16
#define STALL_MS 3000
#define ERRORS_SAID_MAX 10

struct link {
    int fd;
    uint64_t sent, received;          /* whole blocks */
    size_t out_bytes, in_bytes;       /* of the block under way */
    uint64_t out[BLOCK_WORDS], in[BLOCK_WORDS];
};

static uint64_t net_word(uint64_t number, uint64_t i)
{
    return i == 0 ? NET_MAGIC : i == 1 ? number : hash_mix(HASH_GOLDEN * (number * BLOCK_WORDS + i));
}

static struct sockaddr_in server_address(void)
{
    char host[64];
    unsigned port;
    const char *text = param("net", "net", NULL);
    struct sockaddr_in server = {.sin_family = AF_INET};
    if (!text)
        die("net", "kf.net=HOST:PORT is missing");
    if (sscanf(text, "%63[0-9.]:%u", host, &port) != 2 || port == 0 || port > 65535 ||
        inet_pton(AF_INET, host, &server.sin_addr) != 1)
        die("net", "kf.net=%s is not IPv4-ADDRESS:PORT", text);
    server.sin_port = htons((uint16_t)port);
    return server;
}

/* Waits for `events`; false when nothing came for STALL_MS. */
static bool wait_for(int fd, short events)
{
    struct pollfd on = {.fd = fd, .events = events};
    return poll(&on, 1, STALL_MS) > 0;
}

/* A connected socket, or -1. */
static int connect_once(const struct sockaddr_in *server)
{
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0), one = 1, failure = 0;
    if (fd < 0)
        die("net", "socket: %s", strerror(errno));
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    socklen_t length = sizeof failure;
    if (connect(fd, (const struct sockaddr *)server, sizeof *server) < 0) {
        failure = errno;
        if (failure == EINPROGRESS && wait_for(fd, POLLOUT))
            getsockopt(fd, SOL_SOCKET, SO_ERROR, &failure, &length);
    }
    if (failure == 0)
        return fd;
    close(fd);
    return -1;
}

/* -1: the connection is gone; else whether anything was sent. */
static int send_some(struct link *link)
{
    int progress = 0;
    while (link->sent < link->received + WINDOW_BLOCKS) {
        if (link->out_bytes == 0)
            for (uint64_t i = 0; i < BLOCK_WORDS; i++)
                link->out[i] = net_word(link->sent, i);
        ssize_t put = send(link->fd, (char *)link->out + link->out_bytes, BLOCK_BYTES - link->out_bytes, MSG_NOSIGNAL);
        if (put < 0)
            return errno == EAGAIN || errno == EINTR ? progress : -1;
        progress = 1;
        link->out_bytes += (size_t)put;
        if (link->out_bytes == BLOCK_BYTES) {
            link->out_bytes = 0;
            link->sent++;
        }
    }
    return progress;
}

static int receive_some(struct link *link, struct slot *slot)
{
    int progress = 0;
    for (;;) {
        ssize_t got = recv(link->fd, (char *)link->in + link->in_bytes, BLOCK_BYTES - link->in_bytes, 0);
        if (got < 0)
            return errno == EAGAIN || errno == EINTR ? progress : -1;
        if (got == 0)
            return -1;
        progress = 1;
        link->in_bytes += (size_t)got;
        if (link->in_bytes < BLOCK_BYTES)
            continue;
        link->in_bytes = 0;
        uint64_t wrong = 0;
        while (wrong < BLOCK_WORDS && link->in[wrong] == net_word(link->received, wrong))
            wrong++;
        if (wrong < BLOCK_WORDS) {
            if (slot->counter[1] < ERRORS_SAID_MAX)
                error("net", "block %llu came back wrong from word %llu on", (unsigned long long)link->received,
                      (unsigned long long)wrong);
            count(slot, 1, 1);
        }
        memset(link->in, 0, sizeof link->in);
        link->received++;
        count(slot, 0, 1);
    }
}

static void exchange(struct link *link, struct slot *slot)
{
    link->sent = link->received;
    link->out_bytes = link->in_bytes = 0;
    for (;;) {
        int sent = send_some(link), received = sent < 0 ? -1 : receive_some(link, slot);
        if (received < 0)
            return;
        if (sent || received)
            continue;
        short events = link->sent < link->received + WINDOW_BLOCKS ? POLLIN | POLLOUT : POLLIN;
        if (!wait_for(link->fd, events))
            return;
    }
}

static void run(struct slot *slot)
{
    static struct link link;
    struct sockaddr_in server = server_address();
    unsigned connections = 0;
    wait_for_go(slot);
    for (;;) {
        link.fd = connect_once(&server);
        if (link.fd < 0) {
            sleep_us(200000);
            continue;
        }
        say("net connected connections=%u", ++connections);
        exchange(&link, slot);
        close(link.fd);
        sleep_us(50000);
    }
}

const struct workload work_net = {.name = "net", .counter = {"blocks", "bad"}, .every_second = true, .run = run};
