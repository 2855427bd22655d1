/* `peer`: two guests send each other numbered datagrams, at kf.peer=ADDRESS. None may be lost, come twice or out of order:
 * UDP repeats nothing, so what the network between them does at a checkpoint or a restore shows.
 *
 *   datagram, 512 bytes:  | PEER_MAGIC | number | received | mix(GOLDEN * (number * 64 + i)) for i in 3..64 |
 *
 *   number 0 is a greeting or a mere acknowledgement; from 1 on they count. `received` is the last number that the sender got.
 *   sent <= received by the other + WINDOW
 */
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <poll.h>
#include <string.h>
#include <sys/socket.h>

#include "hash.h"
#include "kfguest.h"

#define PEER_MAGIC 0x307265657066666Bull
#define PEER_PORT 4711
#define WORDS 64u
#define WINDOW 8u
#define STALL_MS 60000
#define GREETING_MS 100
#define ERRORS_SAID_MAX 10

struct peer {
    int fd;
    uint64_t sent, acknowledged, received, told;
    bool greeted;
};

static void fault(struct slot *slot, int which, const char *what, uint64_t got, uint64_t expected)
{
    if (slot->counter[which] < ERRORS_SAID_MAX)
        error("peer", "%s: number %llu, expected %llu", what, (unsigned long long)got, (unsigned long long)expected);
}

/* True where it left. */
static bool put(struct peer *peer, uint64_t number)
{
    uint64_t out[WORDS] = {PEER_MAGIC, number, peer->received};
    for (uint64_t i = 3; i < WORDS; i++)
        out[i] = hash_mix(HASH_GOLDEN * (number * WORDS + i));
    /* The other one's port is closed while it boots: that error is told here, once. */
    ssize_t left = send(peer->fd, out, sizeof out, 0);
    if (left < 0 && errno != ECONNREFUSED && errno != EAGAIN && errno != EINTR && errno != EHOSTUNREACH)
        die("peer", "send: %s", strerror(errno));
    if (left == (ssize_t)sizeof out)
        peer->told = peer->received;
    return left == (ssize_t)sizeof out;
}

static void take(struct peer *peer, struct slot *slot)
{
    uint64_t in[WORDS];
    while (recv(peer->fd, in, sizeof in, MSG_DONTWAIT) == (ssize_t)sizeof in && in[0] == PEER_MAGIC) {
        peer->greeted = true;
        if (in[2] > peer->acknowledged)
            peer->acknowledged = in[2];
        if (in[1] == 0)
            continue;
        for (uint64_t i = 3; i < WORDS; i++)
            if (in[i] != hash_mix(HASH_GOLDEN * (in[1] * WORDS + i)))
                fault(slot, 1, "wrong content", in[1], peer->received + 1);
        if (in[1] <= peer->received) {
            fault(slot, 2, "came twice, or late", in[1], peer->received + 1);
            count(slot, 2, 1);
            continue;
        }
        if (in[1] > peer->received + 1) {
            fault(slot, 1, "some were lost", in[1], peer->received + 1);
            count(slot, 1, in[1] - peer->received - 1);
        }
        peer->received = in[1];
        count(slot, 0, 1);
    }
}

static void run(struct slot *slot)
{
    const char *text = param("peer", "peer", NULL);
    struct sockaddr_in here = {.sin_family = AF_INET, .sin_port = htons(PEER_PORT)}, there = here;
    if (!text || inet_pton(AF_INET, text, &there.sin_addr) != 1)
        die("peer", "kf.peer=%s is no IPv4 address", text ? text : "");
    struct peer peer = {.fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0)};
    if (peer.fd < 0 || bind(peer.fd, (struct sockaddr *)&here, sizeof here) < 0 ||
        connect(peer.fd, (struct sockaddr *)&there, sizeof there) < 0)
        die("peer", "socket to %s: %s", text, strerror(errno));
    wait_for_go(slot);
    while (!peer.greeted) {
        struct pollfd on = {.fd = peer.fd, .events = POLLIN};
        put(&peer, 0);
        if (poll(&on, 1, GREETING_MS) > 0)
            take(&peer, slot);
    }
    /* The other one may not have seen any of ours yet. */
    put(&peer, 0);
    say("peer met");
    for (;;) {
        struct pollfd on = {.fd = peer.fd, .events = POLLIN};
        while (peer.sent < peer.acknowledged + WINDOW && put(&peer, peer.sent + 1))
            peer.sent++;
        if (peer.told < peer.received)
            put(&peer, 0);
        if (poll(&on, 1, STALL_MS) == 0)
            error("peer", "nothing came for %d ms behind number %llu", STALL_MS, (unsigned long long)peer.received);
        take(&peer, slot);
    }
}

const struct workload work_peer = {.name = "peer", .counter = {"frames", "lost", "twice"}, .every_second = true, .run = run};
