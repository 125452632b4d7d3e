// A disk that says how memory must be aligned for it, and takes what is aligned so whatever the real one
// wants.
//
// Loaded with LD_PRELOAD. ZEROSTALL_PLACES is the alignment. When the process ends it prints to standard
// error how many direct reads went to memory that is not aligned to 512 bytes.

#define _GNU_SOURCE
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { USUAL = 512, PAGE = 4096 };

static int loose;

static unsigned alignment(void) {
  const char* said = getenv("ZEROSTALL_PLACES");
  return said ? (unsigned)atoi(said) : USUAL;
}

int statx(int folder, const char* restrict name, int flags, unsigned mask, struct statx* restrict facts) {
  long result = syscall(SYS_statx, folder, name, flags, mask, facts);
  if (result == 0 && (mask & STATX_DIOALIGN)) {
    facts->stx_mask |= STATX_DIOALIGN;
    facts->stx_dio_mem_align = alignment();
    facts->stx_dio_offset_align = USUAL;
  }
  return (int)result;
}

ssize_t pread64(int fd, void* to, size_t n, off_t at) {
  if ((uintptr_t)to % USUAL == 0 || !(fcntl(fd, F_GETFL) & O_DIRECT))
    return syscall(SYS_pread64, fd, to, n, at);
  void* aligned = aligned_alloc(PAGE, (n + PAGE - 1) / PAGE * PAGE);
  ssize_t result = syscall(SYS_pread64, fd, aligned, n, at);
  if (result > 0) memcpy(to, aligned, (size_t)result);
  free(aligned);
  __atomic_fetch_add(&loose, 1, __ATOMIC_RELAXED);
  return result;
}

ssize_t pread(int fd, void* to, size_t n, off_t at) {
  return pread64(fd, to, n, at);
}

__attribute__((destructor)) static void tell(void) {
  fprintf(stderr, "direct reads to loose places: %d\n", loose);
}
