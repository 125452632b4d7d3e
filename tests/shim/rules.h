// What the calls ask before they happen and report after.
#pragma once
#include <stdbool.h>
#include <stddef.h>

enum { PATH_BYTES = 4352 };

// What is to happen to one call: `most` bytes may pass; then comes the error (if none passed) or the end.
typedef struct {
  bool trace, kill, kill_after, flip;
  int error;
  size_t most;
  int room_slot;
  unsigned long begin;
} Verdict;

// True while there is no rule at all: the call goes straight on.
bool idle(void);

// Applies every rule that matches: waits, dies, or says what the call may do. `want`: bytes it would move, 0
// if none.
Verdict judge(const char* operation, const char* path, const char* second, size_t want);

// Counts and logs a call that was made (or not), and returns its result with errno as the call left it.
long finish(const Verdict* v, const char* operation, long result, long argument, const char* path,
            const char* second);
