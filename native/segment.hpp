// Shared memory that processes lend each other by file descriptor.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

namespace zs {

// A run of mapped memory; unmapped when nobody holds it any more.
class Mapping {
 public:
  Mapping(int fd, uint64_t nbytes);  // shared; begins where a huge page may
  // Of this process alone, in huge pages where there are some: a disk's request holds only so many pages, and
  // with small ones a block of a few MiB is many requests. Begins at the first byte of a huge page.
  explicit Mapping(uint64_t nbytes);
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  ~Mapping();
  std::byte* data() const { return data_; }
  uint64_t nbytes() const { return nbytes_; }
  // Touches `nbytes` from `offset` on, all by default. False: the memory cannot be had. With `huge`, of
  // memory that nobody has touched yet, as much as can be comes in huge pages, though the system may give
  // shared memory none by itself: less to enter into tables, and few, large requests to a disk.
  bool populate(unsigned threads, bool huge = false, uint64_t offset = 0, uint64_t nbytes = UINT64_MAX) const;
  // Something that must go before the memory is unmapped: its registration with a device.
  void attach(std::shared_ptr<void> guest) { guest_ = std::move(guest); }
  bool has_guest() const { return guest_ != nullptr; }

 private:
  std::byte* data_ = nullptr;
  uint64_t nbytes_;
  uint64_t before_ = 0, after_ = 0;  // bytes mapped around these
  std::shared_ptr<void> guest_;
};

// A memfd (so that a small /dev/shm does not matter) sealed against shrinking and growing: no peer can take
// pages from under a reader, which would be a SIGBUS.
class Segment {
 public:
  // Takes all the memory at once, or throws Kind::capacity. With `populate` false the pages come when they
  // are first written, by readers of files that would only wait for the disk meanwhile.
  Segment(const std::string& name, uint64_t nbytes, bool populate = true);
  static Segment attach(int fd, uint64_t nbytes);  // Kind::format unless it is sealed and of this size
  Segment(Segment&& other) noexcept;
  Segment& operator=(Segment&&) = delete;
  ~Segment();

  int fileno() const;
  uint64_t nbytes() const { return nbytes_; }
  const std::shared_ptr<Mapping>& mapping() const;  // throws after close
  void close() noexcept;                            // who holds the mapping keeps the memory

 private:
  Segment(int fd, std::shared_ptr<Mapping> mapping, uint64_t nbytes);
  int fd_ = -1;
  std::shared_ptr<Mapping> mapping_;
  uint64_t nbytes_;
};

}  // namespace zs
