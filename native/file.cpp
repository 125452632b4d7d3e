#include "file.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <system_error>

#include "error.hpp"

namespace zs {
namespace {

constexpr uint64_t kLargest = 1 << 30;  // Linux moves less than 2 GiB a call

std::string at(uint64_t offset) {
  return " at byte " + std::to_string(offset);
}

uint64_t memory_align_of([[maybe_unused]] int fd) {
#ifdef STATX_DIOALIGN
  struct statx facts{};
  if (::statx(fd, "", AT_EMPTY_PATH, STATX_DIOALIGN, &facts) == 0 && (facts.stx_mask & STATX_DIOALIGN) != 0 &&
      facts.stx_dio_mem_align != 0)
    return facts.stx_dio_mem_align;
#endif
  return File::kAlign;
}

struct alignas(File::kAlign) Page {
  std::byte bytes[File::kAlign];
};

}  // namespace

File::File(int fd, bool direct, const std::string& obstacle) : fd_(::fcntl(fd, F_DUPFD_CLOEXEC, 0)) {
  if (fd_ < 0) throw system_error(Kind::storage, "cannot use file descriptor " + std::to_string(fd), errno);
  flags_ = ::fcntl(fd_, F_GETFL);
  if ((flags_ & O_APPEND) != 0) {
    ::close(fd_);
    throw Error(Kind::usage, "a file opened for appending ignores where it is written");
  }
  if (!direct) return;
  if (!obstacle.empty()) {
    fell_back_ = obstacle;
  } else if (::fcntl(fd_, F_SETFL, flags_ | O_DIRECT) != 0) {
    fell_back_ = "the file system refuses O_DIRECT: " + std::generic_category().message(errno);
  } else {
    direct_.store(true);
    memory_align_ = memory_align_of(fd_);
  }
}

File::~File() {
  restore();
  ::close(fd_);
}

void File::restore() noexcept {
  // Flags belong to the open file, not to the descriptor: they are put back for the one who opened it.
  if (direct_.exchange(false)) ::fcntl(fd_, F_SETFL, flags_);
}

void File::give_up_direct(const std::string& why) {
  const std::lock_guard lock(mutex_);
  if (!fell_back_) fell_back_ = why;
  ::fcntl(fd_, F_SETFL, flags_ & ~O_DIRECT);
  direct_.store(false);
}

std::optional<std::string> File::fell_back() const {
  const std::lock_guard lock(mutex_);
  return fell_back_;
}

uint64_t File::size() const {
  struct stat facts{};
  if (::fstat(fd_, &facts) != 0) throw system_error(Kind::storage, "cannot stat the file", errno);
  return static_cast<uint64_t>(facts.st_size);
}

void File::reserve(uint64_t nbytes) {
  // Direct writes beyond the end of a file take its lock exclusively, one after another; within it they
  // overlap.
  if (!direct_.load() || size() >= nbytes) return;
  if (::fallocate(fd_, 0, 0, static_cast<off_t>(nbytes)) == 0) return;
  if (errno == ENOSPC || errno == EDQUOT || errno == EFBIG)
    throw system_error(Kind::storage, "no room for " + std::to_string(nbytes) + " bytes", errno);
  // Elsewhere there is no such call; writing works all the same.
}

void File::truncate(uint64_t nbytes) {
  while (::ftruncate(fd_, static_cast<off_t>(nbytes)) != 0)
    if (errno != EINTR)
      throw system_error(Kind::storage, "cannot set the file's size to " + std::to_string(nbytes), errno);
}

void File::write(const std::byte* from, uint64_t nbytes, uint64_t offset) {
  const uint64_t tail = direct_.load() ? nbytes % kAlign : 0;
  write_run(from, nbytes - tail, offset);
  if (tail == 0) return;
  Page page{};
  std::memcpy(page.bytes, from + (nbytes - tail), tail);
  write_run(page.bytes, kAlign, offset + (nbytes - tail));
}

void File::write_run(const std::byte* from, uint64_t nbytes, uint64_t offset) {
  for (uint64_t done = 0; done < nbytes;) {
    const bool direct = direct_.load();
    const uint64_t left = nbytes - done, n = left < kLargest ? left : kLargest;
    const ssize_t wrote = ::pwrite(fd_, from + done, n, static_cast<off_t>(offset + done));
    if (wrote < 0) {
      if (errno == EINTR) continue;
      if (errno == EINVAL && direct) {
        give_up_direct("the file system refuses direct writes: " + std::generic_category().message(EINVAL));
        continue;
      }
      throw system_error(Kind::storage, "writing failed" + at(offset + done), errno);
    }
    if (wrote == 0) throw system_error(Kind::storage, "nothing was written" + at(offset + done), EIO);
    uint64_t got = static_cast<uint64_t>(wrote);
    if (direct && got < n) {
      got -= got % kAlign;  // the next direct write must begin at an aligned offset again
      if (got == 0) give_up_direct("a direct write stopped within a block");
    }
    done += got;
  }
}

bool File::read(std::byte* to, uint64_t nbytes, uint64_t offset) {
  const uint64_t tail = direct_.load() ? nbytes % kAlign : 0;
  if (!read_run(to, nbytes - tail, offset)) return false;
  if (tail == 0) return true;
  // Through a page of our own: a direct read fills whole pages, and what follows the image is not ours.
  Page page;
  const uint64_t begin = offset + (nbytes - tail);
  ssize_t got = 0;
  do {
    got = ::pread(fd_, page.bytes, kAlign, static_cast<off_t>(begin));
  } while (got < 0 && errno == EINTR);
  if (got >= static_cast<ssize_t>(tail)) {
    std::memcpy(to + (nbytes - tail), page.bytes, tail);
    return true;
  }
  if (got < 0 && errno != EINVAL) throw system_error(Kind::storage, "reading failed" + at(begin), errno);
  if (got >= 0 && begin + static_cast<uint64_t>(got) >= size()) return false;
  give_up_direct("a direct read of the last block stopped within it");
  return read_run(to + (nbytes - tail), tail, begin);
}

bool File::read_run(std::byte* to, uint64_t nbytes, uint64_t offset) {
  for (uint64_t done = 0; done < nbytes;) {
    const bool direct = direct_.load();
    const uint64_t left = nbytes - done, n = left < kLargest ? left : kLargest;
    const ssize_t count = ::pread(fd_, to + done, n, static_cast<off_t>(offset + done));
    if (count < 0) {
      if (errno == EINTR) continue;
      if (errno == EINVAL && direct) {
        give_up_direct("the file system refuses direct reads: " + std::generic_category().message(EINVAL));
        continue;
      }
      throw system_error(Kind::storage, "reading failed" + at(offset + done), errno);
    }
    uint64_t got = static_cast<uint64_t>(count);
    if (got < n && offset + done + got >= size()) return false;
    if (direct && got < n) {
      got -= got % kAlign;
      if (got == 0) give_up_direct("a direct read stopped within a block");
    } else if (got == 0) {
      return false;
    }
    done += got;
  }
  return true;
}

}  // namespace zs
