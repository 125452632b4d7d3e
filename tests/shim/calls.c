// The file calls of the C library, each asking the rules first (see rules.c).
//
// Loaded with LD_PRELOAD. The work itself is done by the bare system call. What stdio, io_uring and mmap do
// to files is not seen here; neither Python nor zerostall's native code uses them for its files.

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include "rules.h"

enum { PIECES = 1024 };

static void path_of_fd(int fd, char* path) {
  char link[64];
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  ssize_t n = readlink(link, path, PATH_BYTES - 1);
  path[n < 0 ? 0 : n] = 0;
}

static void path_at(int folder, const char* name, char* path) {
  path[0] = 0;
  if (!name) return;
  if (name[0] != '/') {
    if (folder == AT_FDCWD) {
      ssize_t n = readlink("/proc/self/cwd", path, PATH_BYTES - 1);
      path[n < 0 ? 0 : n] = 0;
    } else {
      path_of_fd(folder, path);
    }
    strncat(path, "/", PATH_BYTES - 1 - strlen(path));
  }
  strncat(path, name, PATH_BYTES - 1 - strlen(path));
}

// Asks, makes the call unless it is to fail, and reports.
#define JUDGED(operation, argument, path, second, call)                        \
  do {                                                                         \
    Verdict v = judge(operation, path, second, 0);                             \
    long result = -1;                                                          \
    if (v.error) {                                                             \
      errno = v.error;                                                         \
    } else {                                                                   \
      result = (call);                                                         \
    }                                                                          \
    return (int)finish(&v, operation, result, (long)(argument), path, second); \
  } while (0)

// A call on an open file that moves no bytes.
#define ON_FD(operation, argument, call)         \
  do {                                           \
    if (idle()) return (int)(call);              \
    char path[PATH_BYTES];                       \
    path_of_fd(fd, path);                        \
    JUDGED(operation, argument, path, "", call); \
  } while (0)

// A call on one name, or on two.
#define ON_NAMES(operation, argument, folder, name, folder2, name2, call) \
  do {                                                                    \
    if (idle()) return (int)(call);                                       \
    char path[PATH_BYTES], second[PATH_BYTES];                            \
    path_at(folder, name, path);                                          \
    path_at(folder2, name2, second);                                      \
    JUDGED(operation, argument, path, second, call);                      \
  } while (0)

// Opening with O_DIRECT is an operation of its own, "direct": some file systems refuse that alone.
static int open_at(int folder, const char* name, int flags, mode_t mode) {
  const char* operation = flags & O_DIRECT ? "direct" : "open";
  ON_NAMES(operation, flags, folder, name, AT_FDCWD, NULL, syscall(SYS_openat, folder, name, flags, mode));
}

static mode_t mode_of(int flags, va_list arguments) {
  return (flags & O_CREAT) || (flags & O_TMPFILE) == O_TMPFILE ? va_arg(arguments, mode_t) : 0;
}

#define OPENS(here, at, checked_here, checked_at)           \
  int here(const char* name, int flags, ...) {              \
    va_list arguments;                                      \
    va_start(arguments, flags);                             \
    mode_t mode = mode_of(flags, arguments);                \
    va_end(arguments);                                      \
    return open_at(AT_FDCWD, name, flags, mode);            \
  }                                                         \
  int at(int folder, const char* name, int flags, ...) {    \
    va_list arguments;                                      \
    va_start(arguments, flags);                             \
    mode_t mode = mode_of(flags, arguments);                \
    va_end(arguments);                                      \
    return open_at(folder, name, flags, mode);              \
  }                                                         \
  int checked_here(const char* name, int flags) {           \
    return open_at(AT_FDCWD, name, flags, 0);               \
  }                                                         \
  int checked_at(int folder, const char* name, int flags) { \
    return open_at(folder, name, flags, 0);                 \
  }
OPENS(open, openat, __open_2, __openat_2)
OPENS(open64, openat64, __open64_2, __openat64_2)

// Moves bytes between a file and memory. A verdict may cut the list of pieces short. at < 0: at the file's
// position.
static ssize_t move(bool writes, int fd, const struct iovec* given, int pieces, off_t at, int flags) {
  if (pieces < 0 || pieces > PIECES) return errno = EINVAL, -1;
  const char* operation = writes ? "write" : "read";
  struct iovec list[PIECES];
  char path[PATH_BYTES];
  size_t want = 0;
  for (int i = 0; i < pieces; i++) want += given[i].iov_len;
  path_of_fd(fd, path);
  Verdict v = judge(operation, path, "", want);
  int used = 0;
  for (size_t left = v.most; used < pieces && left; used++) {
    list[used] = given[used];
    if (list[used].iov_len > left) list[used].iov_len = left;
    left -= list[used].iov_len;
  }
  long result = -1;
  if (v.error) {
    errno = v.error;
  } else if (at >= 0) {
    result = syscall(writes ? SYS_pwritev2 : SYS_preadv2, fd, list, used, at, 0L, flags);
  } else {
    result = syscall(writes ? SYS_writev : SYS_readv, fd, list, used);
  }
  if (v.flip && !writes && result > 0) {
    size_t first = list[0].iov_len < (size_t)result ? list[0].iov_len : (size_t)result;
    ((unsigned char*)list[0].iov_base)[first / 2] ^= 4;
  }
  return finish(&v, operation, result, (long)at, path, "");
}

static ssize_t move_one(bool writes, int fd, const void* data, size_t bytes, off_t at) {
  struct iovec one = {(void*)data, bytes};
  return move(writes, fd, &one, 1, at, 0);
}

ssize_t write(int fd, const void* data, size_t n) {
  return idle() ? syscall(SYS_write, fd, data, n) : move_one(true, fd, data, n, -1);
}
ssize_t pwrite64(int fd, const void* data, size_t n, off_t at) {
  return idle() ? syscall(SYS_pwrite64, fd, data, n, at) : move_one(true, fd, data, n, at);
}
ssize_t pwritev64v2(int fd, const struct iovec* list, int n, off_t at, int flags) {
  return idle() ? syscall(SYS_pwritev2, fd, list, n, at, 0L, flags) : move(true, fd, list, n, at, flags);
}
ssize_t writev(int fd, const struct iovec* list, int n) {
  return idle() ? syscall(SYS_writev, fd, list, n) : move(true, fd, list, n, -1, 0);
}
ssize_t read(int fd, void* data, size_t n) {
  return idle() ? syscall(SYS_read, fd, data, n) : move_one(false, fd, data, n, -1);
}
ssize_t pread64(int fd, void* data, size_t n, off_t at) {
  return idle() ? syscall(SYS_pread64, fd, data, n, at) : move_one(false, fd, data, n, at);
}
ssize_t readv(int fd, const struct iovec* list, int n) {
  return idle() ? syscall(SYS_readv, fd, list, n) : move(false, fd, list, n, -1, 0);
}
ssize_t preadv64(int fd, const struct iovec* list, int n, off_t at) {
  return idle() ? syscall(SYS_preadv2, fd, list, n, at, 0L, 0) : move(false, fd, list, n, at, 0);
}
ssize_t pwrite(int fd, const void* data, size_t n, off_t at) {
  return pwrite64(fd, data, n, at);
}
ssize_t pwritev(int fd, const struct iovec* list, int n, off_t at) {
  return pwritev64v2(fd, list, n, at, 0);
}
ssize_t pwritev64(int fd, const struct iovec* list, int n, off_t at) {
  return pwritev64v2(fd, list, n, at, 0);
}
ssize_t pwritev2(int fd, const struct iovec* list, int n, off_t at, int f) {
  return pwritev64v2(fd, list, n, at, f);
}
ssize_t pread(int fd, void* data, size_t n, off_t at) {
  return pread64(fd, data, n, at);
}
ssize_t preadv(int fd, const struct iovec* list, int n, off_t at) {
  return preadv64(fd, list, n, at);
}
ssize_t __read_chk(int fd, void* data, size_t n, size_t room) {
  if (n > room) abort();
  return read(fd, data, n);
}

int fsync(int fd) {
  ON_FD("fsync", 0, syscall(SYS_fsync, fd));
}
int fdatasync(int fd) {
  ON_FD("fdatasync", 0, syscall(SYS_fdatasync, fd));
}
int ftruncate64(int fd, off_t size) {
  ON_FD("truncate", size, syscall(SYS_ftruncate, fd, size));
}
int ftruncate(int fd, off_t size) {
  return ftruncate64(fd, size);
}
int fallocate64(int fd, int mode, off_t at, off_t n) {
  ON_FD("allocate", n, syscall(SYS_fallocate, fd, mode, at, n));
}
int fallocate(int fd, int mode, off_t at, off_t n) {
  return fallocate64(fd, mode, at, n);
}
int posix_fallocate64(int fd, off_t at, off_t n) {
  return fallocate64(fd, 0, at, n) ? errno : 0;
}
int posix_fallocate(int fd, off_t at, off_t n) {
  return posix_fallocate64(fd, at, n);
}

int renameat2(int from, const char* name, int to, const char* name2, unsigned flags) {
  ON_NAMES("rename", flags, from, name, to, name2, syscall(SYS_renameat2, from, name, to, name2, flags));
}
int renameat(int from, const char* name, int to, const char* name2) {
  return renameat2(from, name, to, name2, 0);
}
int rename(const char* name, const char* name2) {
  return renameat2(AT_FDCWD, name, AT_FDCWD, name2, 0);
}
int linkat(int from, const char* name, int to, const char* name2, int flags) {
  ON_NAMES("link", flags, from, name, to, name2, syscall(SYS_linkat, from, name, to, name2, flags));
}
int link(const char* name, const char* name2) {
  return linkat(AT_FDCWD, name, AT_FDCWD, name2, 0);
}
int unlinkat(int folder, const char* name, int flags) {
  const char* operation = flags & AT_REMOVEDIR ? "rmdir" : "unlink";
  ON_NAMES(operation, flags, folder, name, AT_FDCWD, NULL, syscall(SYS_unlinkat, folder, name, flags));
}
int unlink(const char* name) {
  return unlinkat(AT_FDCWD, name, 0);
}
int rmdir(const char* name) {
  return unlinkat(AT_FDCWD, name, AT_REMOVEDIR);
}
int mkdirat(int folder, const char* name, mode_t mode) {
  ON_NAMES("mkdir", mode, folder, name, AT_FDCWD, NULL, syscall(SYS_mkdirat, folder, name, mode));
}
int mkdir(const char* name, mode_t mode) {
  return mkdirat(AT_FDCWD, name, mode);
}

// The one command that can be made to fail is the one that switches O_DIRECT on.
#define CONTROLS(name)                                                                                       \
  int name(int fd, int command, ...) {                                                                       \
    va_list arguments;                                                                                       \
    va_start(arguments, command);                                                                            \
    long argument = va_arg(arguments, long);                                                                 \
    va_end(arguments);                                                                                       \
    if (command != F_SETFL || !(argument & O_DIRECT)) return (int)syscall(SYS_fcntl, fd, command, argument); \
    ON_FD("direct", argument, syscall(SYS_fcntl, fd, command, argument));                                    \
  }
CONTROLS(fcntl)
CONTROLS(fcntl64)
