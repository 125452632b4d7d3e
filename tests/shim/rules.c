// The rules of the fault shim, read from a control folder that faults.py keeps (named by ZEROSTALL_SHIM):
//
//   rules   one rule a line: slot, operations, action, value, nth, times, glob (tabs between them)
//   counts  shared memory of 64-bit numbers: [0] the clock of the trace, [1] the edition of the rules,
//           [2n+2] calls that matched slot n, [2n+3] bytes that passed under it. Shared, so that "the 7th
//           write" counts over all processes and outlives those that are killed. A new edition makes every
//           process read rules again.
//   trace   one line a call: begin, end, pid, operation, result, errno, argument, path, second path.
//           begin and end are ticks of the one clock: a call that began after another ended really came after
//           it.
//
// No locks: rules are replaced by a pointer and never freed, so a child forked at any moment finds them
// whole.

#define _GNU_SOURCE
#include "rules.h"

#include <errno.h>
#include <fcntl.h>
#include <fnmatch.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { RULES = 64, COUNTS = 8192, CLOCK = 0, EDITION = 1 };

typedef enum { FAIL, SHORT, ROOM, DELAY, KILL, KILL_AFTER, HOLD, FLIP, TRACE, ACTIONS } Action;
static const char* const kActions[ACTIONS] = {
    [FAIL] = "error",  [SHORT] = "short", [ROOM] = "room",
    [DELAY] = "delay", [KILL] = "kill",   [KILL_AFTER] = "kill-after",
    [HOLD] = "hold",   [FLIP] = "flip",   [TRACE] = "trace"};

typedef struct {
  int slot;
  char operations[128];
  Action action;
  long value;
  unsigned long nth, times;
  char glob[1024];
} Rule;

typedef struct {
  unsigned long edition;
  int count;
  Rule rules[RULES];
} Rules;

static char rules_path[PATH_BYTES], trace_path[PATH_BYTES];
static _Atomic(Rules*) current;
static _Atomic unsigned long* counts;

__attribute__((constructor)) static void start(void) {
  const char* folder = getenv("ZEROSTALL_SHIM");
  if (!folder || !*folder || strlen(folder) > PATH_BYTES - 16) return;
  char counts_path[PATH_BYTES];
  snprintf(rules_path, sizeof rules_path, "%s/rules", folder);
  snprintf(trace_path, sizeof trace_path, "%s/trace", folder);
  snprintf(counts_path, sizeof counts_path, "%s/counts", folder);
  int fd = (int)syscall(SYS_openat, AT_FDCWD, counts_path, O_RDWR | O_CLOEXEC, 0);
  if (fd < 0) return;
  void* map = mmap(NULL, COUNTS, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  syscall(SYS_close, fd);
  if (map != MAP_FAILED) counts = map;
}

static bool parse(char* line, Rule* rule) {
  char *field[7], *rest = line;
  for (int i = 0; i < 7; i++) {
    if (!(field[i] = strsep(&rest, "\t"))) return false;
  }
  rule->slot = atoi(field[0]);
  if (rule->slot < 0 || (2 * (size_t)rule->slot + 4) * sizeof *counts > COUNTS) return false;
  snprintf(rule->operations, sizeof rule->operations, ",%s,", field[1]);
  rule->value = atol(field[3]);
  rule->nth = strtoul(field[4], NULL, 10);
  rule->times = strtoul(field[5], NULL, 10);
  snprintf(rule->glob, sizeof rule->glob, "%s", field[6]);
  for (int i = 0; i < ACTIONS; i++) {
    if (strcmp(field[2], kActions[i])) continue;
    rule->action = (Action)i;
    return true;
  }
  return false;
}

// The rules as they stand now: read afresh when their edition is new.
static const Rules* load(void) {
  if (!counts) return NULL;
  unsigned long edition = atomic_load(&counts[EDITION]);
  Rules* known = atomic_load(&current);
  if (known && known->edition == edition) return known;
  char text[64 << 10];
  size_t have = 0;
  int fd = (int)syscall(SYS_openat, AT_FDCWD, rules_path, O_RDONLY | O_CLOEXEC, 0);
  if (fd < 0) return NULL;
  for (long n; have < sizeof text - 1; have += (size_t)n) {
    if ((n = syscall(SYS_read, fd, text + have, sizeof text - 1 - have)) <= 0) break;
  }
  syscall(SYS_close, fd);
  text[have] = 0;
  Rules* fresh = calloc(1, sizeof *fresh);
  if (!fresh) abort();
  fresh->edition = edition;
  char* rest = text;
  for (char* line; fresh->count < RULES && (line = strsep(&rest, "\n"));) {
    if (parse(line, &fresh->rules[fresh->count])) fresh->count++;
  }
  atomic_store(&current, fresh);
  return fresh;
}

bool idle(void) {
  int kept = errno;
  const Rules* now = load();
  errno = kept;
  return !now || !now->count;
}

static bool touches(const Rule* rule, const char* operation, const char* path, const char* second) {
  char word[32];
  snprintf(word, sizeof word, ",%s,", operation);
  if (strcmp(rule->operations, ",*,") && !strstr(rule->operations, word)) return false;
  return !fnmatch(rule->glob, path, 0) || (second[0] && !fnmatch(rule->glob, second, 0));
}

static void nap(long microseconds) {
  struct timespec t = {microseconds / 1000000, microseconds % 1000000 * 1000};
  while (nanosleep(&t, &t) && errno == EINTR) {
  }
}

static void die(void) {
  syscall(SYS_kill, getpid(), SIGKILL);
  for (;;) nap(1000000);
}

static bool still_there(int slot) {
  const Rules* now = load();
  for (int i = 0; now && i < now->count; i++) {
    if (now->rules[i].slot == slot) return true;
  }
  return false;
}

static void at_most(Verdict* v, size_t bytes) {
  if (bytes < v->most) v->most = bytes;
}

static void apply(const Rule* rule, Verdict* v, size_t want) {
  size_t value = rule->value < 0 ? 0 : (size_t)rule->value;
  switch (rule->action) {
    case FAIL:
      if (!v->error) v->error = (int)rule->value;
      break;
    case SHORT:
      at_most(v, value);
      break;
    case ROOM: {
      unsigned long used = atomic_load(&counts[2 * rule->slot + 3]);
      size_t room = used < value ? value - used : 0;
      if (want && !room && !v->error) v->error = ENOSPC;
      at_most(v, room);
      v->room_slot = rule->slot;
      break;
    }
    case DELAY:
      nap(rule->value);
      break;
    case KILL:
      v->kill = true;
      at_most(v, value);
      break;
    case KILL_AFTER:
      v->kill_after = true;
      break;
    case HOLD:
      while (still_there(rule->slot)) nap(1000);
      break;
    case FLIP:
      v->flip = true;
      break;
    case TRACE:
      v->trace = true;
      break;
    case ACTIONS:
      break;
  }
}

Verdict judge(const char* operation, const char* path, const char* second, size_t want) {
  Verdict v = {.most = want, .room_slot = -1};
  int kept = errno;
  const Rules* all = load();
  for (int i = 0; all && i < all->count; i++) {
    const Rule* rule = &all->rules[i];
    if (!touches(rule, operation, path, second)) continue;
    unsigned long number = atomic_fetch_add(&counts[2 * rule->slot + 2], 1) + 1;
    if (number < rule->nth || (rule->times && number >= rule->nth + rule->times)) continue;
    apply(rule, &v, want);
  }
  if (v.kill && !v.most) die();
  if (v.trace) v.begin = atomic_fetch_add(&counts[CLOCK], 1);
  errno = kept;
  return v;
}

static void append_path(char* line, size_t bytes, size_t* used, const char* path) {
  for (; *path && *used + 3 < bytes; path++) {
    char c = *path == '\t' ? 't' : *path == '\n' ? 'n' : *path == '\\' ? '\\' : 0;
    if (c) line[(*used)++] = '\\';
    line[(*used)++] = c ? c : *path;
  }
}

static void log_call(const Verdict* v, const char* operation, long result, int error, long argument,
                     const char* path, const char* second) {
  char line[2 * PATH_BYTES + 256];
  unsigned long end = atomic_fetch_add(&counts[CLOCK], 1);
  size_t used = (size_t)snprintf(line, 256, "%lu\t%lu\t%d\t%s\t%ld\t%d\t%ld\t", v->begin, end, getpid(),
                                 operation, result, error, argument);
  append_path(line, sizeof line - 2, &used, path);
  line[used++] = '\t';
  append_path(line, sizeof line - 2, &used, second);
  line[used++] = '\n';
  int fd = (int)syscall(SYS_openat, AT_FDCWD, trace_path, O_WRONLY | O_APPEND | O_CLOEXEC, 0);
  if (fd < 0) return;
  if (syscall(SYS_write, fd, line, used) < 0) abort();
  syscall(SYS_close, fd);
}

long finish(const Verdict* v, const char* operation, long result, long argument, const char* path,
            const char* second) {
  int kept = errno;
  if (v->room_slot >= 0 && result > 0) atomic_fetch_add(&counts[2 * v->room_slot + 3], (unsigned long)result);
  if (v->trace) log_call(v, operation, result, result < 0 ? kept : 0, argument, path, second);
  if (v->kill || v->kill_after) die();
  errno = kept;
  return result;
}
