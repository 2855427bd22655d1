/* Counts executed instructions by their first byte. A tool of a third party: see opcodes.toml.
 *   cc -shared -fPIC -O2 -DINTERFACE=1 -o opcodes-1.so opcodes.c        QEMU 7.2
 *   cc -shared -fPIC -O2 -DINTERFACE=4 -o opcodes-4.so opcodes.c        QEMU 10.0
 *   cc -shared -fPIC -O2 -DINTERFACE=7 -o opcodes-7.so opcodes.c        QEMU 11.1
 * With QEMU's own header installed, include <qemu-plugin.h> instead of the declarations. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct qemu_plugin_tb;
struct qemu_plugin_insn;
#if INTERFACE >= 7 /* callbacks receive data instead of the plugin's id */
void qemu_plugin_register_vcpu_tb_trans_cb(uint64_t, void (*)(struct qemu_plugin_tb *, void *), void *);
void qemu_plugin_register_atexit_cb(uint64_t, void (*)(void *), void *);
#else
void qemu_plugin_register_vcpu_tb_trans_cb(uint64_t, void (*)(uint64_t, struct qemu_plugin_tb *));
void qemu_plugin_register_atexit_cb(uint64_t, void (*)(uint64_t, void *), void *);
#endif
void qemu_plugin_register_vcpu_insn_exec_cb(struct qemu_plugin_insn *, void (*)(unsigned, void *), int, void *);
size_t qemu_plugin_tb_n_insns(const struct qemu_plugin_tb *);
struct qemu_plugin_insn *qemu_plugin_tb_get_insn(const struct qemu_plugin_tb *, size_t);
#if INTERFACE >= 4
size_t qemu_plugin_insn_data(const struct qemu_plugin_insn *, void *, size_t);
#else
const void *qemu_plugin_insn_data(const struct qemu_plugin_insn *);
#endif

__attribute__((visibility("default"))) int qemu_plugin_version = INTERFACE;
static uint64_t times[256];
static char part[4096];

static void executed(unsigned vcpu, void *which) { (void)vcpu; ++*(uint64_t *)which; }

static void count_in(struct qemu_plugin_tb *block) {
    for (size_t i = 0; i < qemu_plugin_tb_n_insns(block); i++) {
        struct qemu_plugin_insn *insn = qemu_plugin_tb_get_insn(block, i);
        uint8_t first;
#if INTERFACE >= 4
        qemu_plugin_insn_data(insn, &first, 1);
#else
        first = *(const uint8_t *)qemu_plugin_insn_data(insn);
#endif
        qemu_plugin_register_vcpu_insn_exec_cb(insn, executed, 0, &times[first]);
    }
}

static void write_part(void) {
    FILE *out = fopen(part, "w");
    if (!out) { perror(part); abort(); }
    fprintf(out, "byte,times\n");
    for (int i = 0; i < 256; i++) if (times[i]) fprintf(out, "%02x,%lu\n", i, (unsigned long)times[i]);
    fclose(out);
}

#if INTERFACE >= 7
static void translated(struct qemu_plugin_tb *block, void *unused) { (void)unused; count_in(block); }
static void at_exit(void *unused) { (void)unused; write_part(); }
#else
static void translated(uint64_t id, struct qemu_plugin_tb *block) { (void)id; count_in(block); }
static void at_exit(uint64_t id, void *unused) { (void)id, (void)unused; write_part(); }
#endif

__attribute__((visibility("default"))) int qemu_plugin_install(uint64_t id, const void *info, int argc, char **argv) {
    (void)info;
    for (int i = 0; i < argc; i++) if (!strncmp(argv[i], "out=", 4)) snprintf(part, sizeof part, "%s", argv[i] + 4);
#if INTERFACE >= 7
    qemu_plugin_register_vcpu_tb_trans_cb(id, translated, NULL);
#else
    qemu_plugin_register_vcpu_tb_trans_cb(id, translated);
#endif
    qemu_plugin_register_atexit_cb(id, at_exit, NULL);
    return part[0] ? 0 : 1;
}
