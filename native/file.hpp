// Reading and writing a file that somebody else opened, past the page cache where the file system lets us.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>

namespace zs {

// Safe to use from several threads. Only the last run of a file may have a length that is no multiple of
// kAlign, and every offset is one, if the file is to be read or written directly.
class File {
 public:
  static constexpr uint64_t kAlign = 4096;

  // Keeps a duplicate of `fd`. With `direct`, O_DIRECT is on until restore(); `obstacle`, where not empty,
  // is a reason known beforehand why that cannot be.
  File(int fd, bool direct, const std::string& obstacle);
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  ~File();

  bool direct() const { return direct_.load(); }
  // What direct reads want the memory's address to be a multiple of: the disk's word (Linux 6.1), else
  // kAlign.
  uint64_t memory_align() const { return memory_align_; }
  uint64_t size() const;
  void reserve(
      uint64_t nbytes);  // room for so much, with direct I/O only; a full disk is known before the first byte
  // A length that is no multiple of kAlign is padded with zeros to one: truncate() afterwards.
  void write(const std::byte* from, uint64_t nbytes, uint64_t offset);
  // False: the file ended early.
  bool read(std::byte* to, uint64_t nbytes, uint64_t offset);
  void truncate(uint64_t nbytes);
  void restore() noexcept;  // the flags as they were
  std::optional<std::string> fell_back()
      const;  // why the page cache was used although `direct` was asked for

 private:
  void give_up_direct(const std::string& why);
  void write_run(const std::byte* from, uint64_t nbytes, uint64_t offset);
  bool read_run(std::byte* to, uint64_t nbytes, uint64_t offset);

  int fd_;
  int flags_;
  uint64_t memory_align_ = kAlign;
  std::atomic<bool> direct_{false};
  mutable std::mutex mutex_;
  std::optional<std::string> fell_back_;
};

}  // namespace zs
