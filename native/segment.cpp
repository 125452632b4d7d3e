#include "segment.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "error.hpp"
#include "huge_pages.hpp"
#include "memory.hpp"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

namespace zs {
namespace {

constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW;
constexpr uint64_t kPage = 4096;
constexpr uint64_t kStretch = 32 << 20;  // populated in one call

void touch(std::byte* data, uint64_t nbytes) {
  // Not a store of a constant: the memory may be in use by another process.
  for (uint64_t at = 0; at < nbytes; at += kPage)
    __atomic_fetch_or(reinterpret_cast<uint8_t*>(data + at), 0, __ATOMIC_RELAXED);
}

unsigned default_threads() {
  return std::clamp(std::thread::hardware_concurrency(), 1u, 8u);
}

}  // namespace

Mapping::Mapping(int fd, uint64_t nbytes) : nbytes_(nbytes) {
  void* room = ::mmap(nullptr, nbytes + kHugePage, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (room == MAP_FAILED)
    throw system_error(Kind::capacity, "cannot map " + std::to_string(nbytes) + " bytes", errno);
  before_ = -reinterpret_cast<uintptr_t>(room) % kHugePage;
  after_ = kHugePage - before_;
  data_ = static_cast<std::byte*>(room) + before_;
  if (::mmap(data_, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0) == MAP_FAILED) {
    const int number = errno;
    ::munmap(room, nbytes + kHugePage);
    throw system_error(Kind::capacity, "cannot map " + std::to_string(nbytes) + " bytes", number);
  }
  ::madvise(data_, nbytes_, MADV_HUGEPAGE);  // where the system allows it; nothing depends on it
}

Mapping::Mapping(uint64_t nbytes) : nbytes_(nbytes) {
  void* data =
      ::mmap(nullptr, nbytes + kHugePage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (data == MAP_FAILED)
    throw system_error(Kind::capacity, "cannot have " + std::to_string(nbytes) + " bytes of memory", errno);
  before_ = -reinterpret_cast<uintptr_t>(data) % kHugePage;
  after_ = kHugePage - before_;
  data_ = static_cast<std::byte*>(data) + before_;
  ::madvise(data_, nbytes_, MADV_HUGEPAGE);
}

Mapping::~Mapping() {
  guest_.reset();
  ::munmap(data_ - before_, before_ + nbytes_ + after_);
}

bool Mapping::populate(unsigned threads, bool huge, uint64_t offset, uint64_t nbytes) const {
  nbytes = std::min(nbytes, nbytes_ - offset);
  const uint64_t stretches = (nbytes + kStretch - 1) / kStretch;
  std::atomic<uint64_t> next{0};
  std::atomic<bool> good{true}, huge_left{huge};
  const auto work = [&] {
    for (uint64_t k; good.load() && (k = next.fetch_add(1)) < stretches;) {
      std::byte* const begin = data_ + offset + k * kStretch;
      const uint64_t n = std::min(kStretch, nbytes - k * kStretch);
      // Where they have run out, looking for more only takes time.
      if (huge_left.load() && !make_huge_pages(begin, n)) huge_left.store(false);
      while (::madvise(begin, n, MADV_POPULATE_WRITE) != 0) {
        if (errno == EINTR || errno == EAGAIN) continue;
        if (errno == EINVAL)  // a kernel before 5.14
          touch(begin, n);
        else
          good.store(false);
        break;
      }
    }
  };
  std::vector<std::thread> helpers;
  const uint64_t most = std::min<uint64_t>(std::max(threads, 1u), std::max<uint64_t>(stretches, 1));
  try {
    for (uint64_t k = 1; k < most; ++k) helpers.emplace_back(work);
  } catch (const std::system_error&) {
    // Fewer threads do it too.
  }
  work();
  for (std::thread& helper : helpers) helper.join();
  return good.load();
}

Segment::Segment(const std::string& name, uint64_t nbytes, bool populate) : nbytes_(nbytes) {
  if (nbytes == 0) throw Error(Kind::usage, "a segment has no bytes");
  const auto refuse = [&](const std::string& why) {
    return Error(Kind::capacity, "cannot have " + std::to_string(nbytes) + " bytes of shared memory for " +
                                     name + ": " + why);
  };
  if (const uint64_t available = available_memory(); nbytes > available)
    throw refuse("only " + std::to_string(available) + " are available");
  fd_ = ::memfd_create(name.c_str(), MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (fd_ < 0) throw system_error(Kind::capacity, "cannot create shared memory " + name, errno);
  try {
    if (::ftruncate(fd_, static_cast<off_t>(nbytes)) != 0) throw refuse("the kernel refuses the size");
    mapping_ = std::make_shared<Mapping>(fd_, nbytes);
    // Before 5.14 pages would come with the first touch, and a SIGBUS where there are none.
    if (::madvise(mapping_->data(), kPage, MADV_POPULATE_WRITE) != 0 && errno == EINVAL &&
        ::fallocate(fd_, 0, 0, static_cast<off_t>(nbytes)) != 0)
      throw refuse("the kernel has not so many pages");
    if (populate && !mapping_->populate(default_threads(), true))
      throw refuse("the kernel has not so many pages");
    if (::fcntl(fd_, F_ADD_SEALS, kSeals) != 0)
      throw system_error(Kind::capability, "cannot seal shared memory", errno);
  } catch (...) {
    ::close(fd_);
    throw;
  }
}

Segment Segment::attach(int fd, uint64_t nbytes) {
  struct stat facts{};
  if (::fstat(fd, &facts) != 0)
    throw system_error(Kind::format, "descriptor " + std::to_string(fd) + " is no segment", errno);
  const int seals = ::fcntl(fd, F_GET_SEALS);
  if (seals < 0 || (seals & kSeals) != kSeals)
    throw Error(Kind::format, "descriptor " + std::to_string(fd) + " is no segment: its size is not sealed");
  if (nbytes == 0 || static_cast<uint64_t>(facts.st_size) != nbytes)
    throw Error(Kind::format,
                "the segment has " + std::to_string(facts.st_size) + " bytes, not " + std::to_string(nbytes));
  const int own = ::fcntl(fd, F_DUPFD_CLOEXEC, 0);
  if (own < 0) throw system_error(Kind::capability, "cannot duplicate a descriptor", errno);
  try {
    return {own, std::make_shared<Mapping>(own, nbytes), nbytes};
  } catch (...) {
    ::close(own);
    throw;
  }
}

Segment::Segment(int fd, std::shared_ptr<Mapping> mapping, uint64_t nbytes)
    : fd_(fd), mapping_(std::move(mapping)), nbytes_(nbytes) {}

Segment::Segment(Segment&& other) noexcept
    : fd_(std::exchange(other.fd_, -1)), mapping_(std::move(other.mapping_)), nbytes_(other.nbytes_) {}

Segment::~Segment() {
  close();
}

void Segment::close() noexcept {
  mapping_.reset();
  if (fd_ >= 0) ::close(std::exchange(fd_, -1));
}

int Segment::fileno() const {
  if (fd_ < 0) throw Error(Kind::usage, "the segment is closed");
  return fd_;
}

const std::shared_ptr<Mapping>& Segment::mapping() const {
  if (!mapping_) throw Error(Kind::usage, "the segment is closed");
  return mapping_;
}

}  // namespace zs
