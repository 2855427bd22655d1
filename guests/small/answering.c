/* A server of a workload: many clients over TCP, each with one request at a time and its answer.
 *
 *   request, 16 bytes | magic | a value |        anything else ends the connection
 */
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "kfguest.h"

#define CLIENTS_MAX 64

struct client {
    int fd;
    size_t have;
    uint64_t in[2];
    uint8_t *out; /* what of an answer has not been taken yet */
    size_t at, end;
};

static const int on = 1;

static int listen_on(const struct service *service)
{
    struct sockaddr_in here = {.sin_family = AF_INET, .sin_port = htons(service->port)};
    int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (listener < 0 || bind(listener, (struct sockaddr *)&here, sizeof here) < 0 || listen(listener, CLIENTS_MAX) < 0)
        die(service->work, "listen: %s", strerror(errno));
    return listener;
}

static bool accept_one(const struct service *service, int listener, struct client *client)
{
    int fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (fd < 0)
        return false;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    *client = (struct client){.fd = fd, .out = malloc(service->answer_max)};
    if (!client->out)
        die(service->work, "no memory for an answer");
    return true;
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

static bool talk(const struct service *service, void *self, struct client *client)
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
    if (client->in[0] != service->magic)
        return false;
    client->at = 0;
    client->end = service->answer(self, client->in[1], client->out);
    return send_more(client);
}

void answer_clients(const struct service *service, void *self, struct slot *slot)
{
    int listener = listen_on(service);
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
            if (fds[i + 1].revents && !talk(service, self, &clients[i])) {
                close(clients[i].fd);
                free(clients[i].out);
                clients[i] = clients[--there];
            }
        }
        service->count(self, slot);
        if (fds[0].revents && accept_one(service, listener, &clients[there]))
            there++;
    }
}
