/* `web`: a server whose answers are larger than its questions and cost something, on port 4713 over TCP, for many clients at once.
 *
 *   request, 16 bytes              | WEB_MAGIC | id |
 *   answer, 24 + kf.web.bytes      | WEB_MAGIC | id | chain over all ids | ... |
 *
 * An answer is made from kf.web.read pages of shared content (256), which makes the text, and writes kf.web.dirty pages of sessions (24),
 * others each time, of kf.web.mib MiB (16).
 */
#include <string.h>

#include "hash.h"
#include "kfguest.h"

#define WEB_MAGIC 0x0000006265776B66ull
#define WEB_PORT 4713
#define HEAD_WORDS 3
#define CONTENT_MIB 4

struct web {
    uint64_t answers, chain;
    uint64_t bytes, reads, dirty;
    uint64_t *content, *sessions;
    uint64_t content_pages, session_pages, page, stride;
};

static size_t answer(void *self, uint64_t id, uint8_t *out)
{
    struct web *web = self;
    uint64_t sum = id;
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
    memcpy(out, head, sizeof head);
    memcpy(out + sizeof head, web->content, web->bytes);
    web->answers++;
    return sizeof head + web->bytes;
}

static void count_answers(const void *self, struct slot *slot)
{
    const struct web *web = self;
    atomic_store_explicit(&slot->counter[0], web->answers, memory_order_relaxed);
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
    struct service service = {
        .work = "web",
        .port = WEB_PORT,
        .magic = WEB_MAGIC,
        .answer_max = sizeof(uint64_t[HEAD_WORDS]) + web.bytes,
        .answer = answer,
        .count = count_answers,
    };
    answer_clients(&service, &web, slot);
}

const struct workload work_web = {.name = "web", .counter = {"answers"}, .every_second = true, .run = run};
