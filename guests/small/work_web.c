/* `web`: a server whose answers are larger than its questions and cost something, on port 4713 over TCP, for many clients at once.
 *
 *   request, 16 bytes              | WEB_MAGIC | id |
 *   answer, 24 + kf.web.bytes      | WEB_MAGIC | id | chain over all ids | ... |
 *
 * An answer is made from kf.web.read pages of shared content (256), which makes the text, and writes kf.web.dirty pages of sessions (24),
 * others each time, of kf.web.mib MiB (16).
 */
#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "hash.h"
#include "kfguest.h"

#define WEB_MAGIC 0x0000006265776B66ull
#define WEB_PORT 4713
#define CLIENTS_MAX 64
#define HEAD_WORDS 3
#define CONTENT_MIB 4

struct client {
    int fd;
    size_t have;
    uint64_t in[2];
    uint8_t *out; /* what of an answer has not been taken yet */
    size_t at, end;
};

struct web {
    uint64_t answers, chain;
    uint64_t bytes, reads, dirty;
    uint64_t *content, *sessions;
    uint64_t content_pages, session_pages, page, stride;
};

static void make_answer(struct web *web, struct client *client)
{
    uint64_t id = client->in[1], sum = id;
    web->chain = hash_mix(web->chain ^ id);
    for (uint64_t i = 0; i < web->reads; i++) {
        const uint64_t *words = web->content + hash_mix(id + i) % web->content_pages * PAGE_WORDS;
        for (size_t w = 0; w < PAGE_WORDS; w += 8)
            sum += words[w];
    }
    for (uint64_t i = 0; i < web->dirty; i++) {
        web->page = (web->page + web->stride) % web->session_pages;
        uint64_t *words = web->sessions + web->page * PAGE_WORDS;
        words[id % PAGE_WORDS] = sum;
        words[0]++;
    }
    uint64_t head[HEAD_WORDS] = {WEB_MAGIC, id, web->chain};
    memcpy(client->out, head, sizeof head);
    memcpy(client->out + sizeof head, web->content, web->bytes);
    client->at = 0;
    client->end = sizeof head + web->bytes;
    web->answers++;
}

/* False where the client is gone. */
static bool send_more(struct client *client)
{
    while (client->at < client->end) {
        ssize_t sent = send(client->fd, client->out + client->at, client->end - client->at, MSG_NOSIGNAL);
        if (sent < 0)
            return errno == EAGAIN || errno == EINTR;
        client->at += (size_t)sent;
    }
    return true;
}

static bool talk(struct web *web, struct client *client)
{
    if (client->at < client->end)
        return send_more(client);
    ssize_t got = read(client->fd, (uint8_t *)client->in + client->have, sizeof client->in - client->have);
    if (got <= 0)
        return got < 0 && (errno == EAGAIN || errno == EINTR);
    client->have += (size_t)got;
    if (client->have < sizeof client->in)
        return true;
    client->have = 0;
    if (client->in[0] != WEB_MAGIC)
        return false;
    make_answer(web, client);
    return send_more(client);
}

static void run(struct slot *slot)
{
    uint64_t mib = param_number("web", "mib", 16, 1, 1 << 20);
    struct web web = {
        .bytes = param_number("web", "bytes", 16384, 0, CONTENT_MIB << 20),
        .reads = param_number("web", "read", 256, 0, 1 << 20),
        .dirty = param_number("web", "dirty", 24, 0, 1 << 20),
        .content = map_mib("web", CONTENT_MIB, false),
        .content_pages = (CONTENT_MIB << 20) / PAGE_BYTES,
        .sessions = map_mib("web", mib, false),
        .session_pages = (mib << 20) / PAGE_BYTES,
    };
    web.stride = stride_over(web.session_pages);
    for (uint64_t i = 0; i < web.content_pages * PAGE_WORDS; i++)
        web.content[i] = hash_mix(i);
    int listener = listen_on("web", WEB_PORT, CLIENTS_MAX);
    struct client clients[CLIENTS_MAX];
    size_t there = 0;
    wait_for_go(slot);
    for (;;) {
        struct pollfd fds[CLIENTS_MAX + 1] = {{.fd = listener, .events = there < CLIENTS_MAX ? POLLIN : 0}};
        for (size_t i = 0; i < there; i++)
            fds[i + 1] = (struct pollfd){.fd = clients[i].fd, .events = clients[i].at < clients[i].end ? POLLOUT : POLLIN};
        if (poll(fds, there + 1, -1) < 0)
            continue;
        /* From the last to the first: one that is gone is replaced by the last. */
        for (size_t i = there; i-- > 0;) {
            if (fds[i + 1].revents && !talk(&web, &clients[i])) {
                close(clients[i].fd);
                free(clients[i].out);
                clients[i] = clients[--there];
            }
        }
        atomic_store_explicit(&slot->counter[0], web.answers, memory_order_relaxed);
        int fd = fds[0].revents ? accept_one(listener) : -1;
        if (fd < 0)
            continue;
        clients[there] = (struct client){.fd = fd, .out = malloc(sizeof(uint64_t[HEAD_WORDS]) + web.bytes)};
        if (!clients[there++].out)
            die("web", "no memory for an answer");
    }
}

const struct workload work_web = {.name = "web", .counter = {"answers"}, .every_second = true, .run = run};
