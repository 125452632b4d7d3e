// Reads or writes a file past the page cache in blocks, with a CRC-32C of each: by threads that block in
// pread and pwrite, as native/file.cpp does, or by threads with an io_uring each, whose buffers and file are
// registered. The system calls are made here: no library is needed. Prints wall seconds and processor
// seconds.
//
//   uring pool|ring read|write PATH NBYTES BLOCK THREADS DEPTH
//
// DEPTH: requests that a ring keeps in flight.
#include <fcntl.h>
#include <linux/io_uring.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "../native/crc32c.hpp"

namespace {

struct Plan {
  bool write;
  int fd;
  uint64_t nbytes, block;
  unsigned threads, depth;
  std::byte* memory;  // of the whole file, as an image lies in memory
  std::atomic<uint64_t> next{0};
  std::atomic<uint32_t> sums{0};

  // The next block, or false.
  bool take(uint64_t& at, uint64_t& size) {
    at = next.fetch_add(block);
    if (at >= nbytes) return false;
    size = std::min(block, nbytes - at);
    return true;
  }
  void look(uint64_t at, uint64_t size) { sums ^= zs::crc32c(memory + at, size); }
};

[[noreturn]] void fail(const char* what, int code) {
  std::fprintf(stderr, "%s: %s\n", what, std::strerror(code));
  std::exit(1);
}

void pool(Plan& plan) {
  for (uint64_t at, size; plan.take(at, size);) {
    if (plan.write) plan.look(at, size);
    for (uint64_t done = 0; done < size;) {
      const ssize_t count = plan.write ? ::pwrite(plan.fd, plan.memory + at + done, size - done, at + done)
                                       : ::pread(plan.fd, plan.memory + at + done, size - done, at + done);
      if (count <= 0) fail("moving", count < 0 ? errno : EIO);
      done += count;
    }
    if (!plan.write) plan.look(at, size);
  }
}

class Ring {
 public:
  Ring(const Plan& plan, bool registered) {
    io_uring_params facts{};
    fd_ = static_cast<int>(::syscall(SYS_io_uring_setup, plan.depth, &facts));
    if (fd_ < 0) fail("io_uring_setup", errno);
    const size_t requests = facts.sq_off.array + facts.sq_entries * sizeof(unsigned);
    const size_t answers = facts.cq_off.cqes + facts.cq_entries * sizeof(io_uring_cqe);
    auto* const shared = map(std::max(requests, answers), IORING_OFF_SQ_RING);
    entries_ = static_cast<io_uring_sqe*>(map(facts.sq_entries * sizeof(io_uring_sqe), IORING_OFF_SQES));
    const auto at = [&](unsigned offset) {
      return reinterpret_cast<unsigned*>(static_cast<char*>(shared) + offset);
    };
    tail_ = at(facts.sq_off.tail), mask_ = *at(facts.sq_off.ring_mask), array_ = at(facts.sq_off.array);
    done_head_ = at(facts.cq_off.head), done_tail_ = at(facts.cq_off.tail),
    done_mask_ = *at(facts.cq_off.ring_mask);
    answers_ = reinterpret_cast<io_uring_cqe*>(static_cast<char*>(shared) + facts.cq_off.cqes);
    if ((facts.features & IORING_FEAT_SINGLE_MMAP) == 0) fail("one mapping for both rings", ENOTSUP);
    const iovec all{plan.memory, plan.nbytes};
    registered_ = registered && plan.nbytes <= (uint64_t{1} << 30) &&
                  ::syscall(SYS_io_uring_register, fd_, IORING_REGISTER_BUFFERS, &all, 1) == 0;
    file_ = ::syscall(SYS_io_uring_register, fd_, IORING_REGISTER_FILES, &plan.fd, 1) == 0;
  }
  bool registered() const { return registered_; }

  void ask(const Plan& plan, uint64_t at, uint64_t size) {
    const unsigned tail = *tail_, slot = tail & mask_;
    io_uring_sqe& entry = entries_[slot];
    std::memset(&entry, 0, sizeof entry);
    if (registered_)
      entry.opcode = plan.write ? IORING_OP_WRITE_FIXED : IORING_OP_READ_FIXED;
    else
      entry.opcode = plan.write ? IORING_OP_WRITE : IORING_OP_READ;
    entry.fd = file_ ? 0 : plan.fd;
    if (file_) entry.flags = IOSQE_FIXED_FILE;
    entry.addr = reinterpret_cast<uint64_t>(plan.memory + at);
    entry.len = static_cast<unsigned>(size);
    entry.off = at;
    entry.user_data = at;
    array_[slot] = slot;
    __atomic_store_n(tail_, tail + 1, __ATOMIC_RELEASE);
    ++untold_;
  }
  // Waits for one; returns where it lies. Short moves end the program: this is a measurement.
  uint64_t answer(const Plan& plan) {
    while (*done_head_ == __atomic_load_n(done_tail_, __ATOMIC_ACQUIRE)) enter(1);
    if (untold_ != 0) enter(0);
    const io_uring_cqe one = answers_[*done_head_ & done_mask_];
    __atomic_store_n(done_head_, *done_head_ + 1, __ATOMIC_RELEASE);
    const uint64_t wanted = std::min<uint64_t>(plan.block, plan.nbytes - one.user_data);
    if (one.res < 0 || static_cast<uint64_t>(one.res) != wanted)
      fail("a request", one.res < 0 ? -one.res : EIO);
    return one.user_data;
  }

 private:
  void enter(unsigned least) {
    const long told =
        ::syscall(SYS_io_uring_enter, fd_, untold_, least, least ? IORING_ENTER_GETEVENTS : 0, nullptr, 0);
    if (told < 0 && errno != EINTR) fail("io_uring_enter", errno);
    if (told > 0) untold_ -= static_cast<unsigned>(told);
  }
  void* map(size_t nbytes, off_t what) {
    void* const at = ::mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd_, what);
    if (at == MAP_FAILED) fail("mapping the rings", errno);
    return at;
  }
  int fd_;
  bool registered_ = false, file_ = false;
  unsigned untold_ = 0, mask_, done_mask_;
  unsigned *tail_, *array_, *done_head_, *done_tail_;
  io_uring_sqe* entries_;
  io_uring_cqe* answers_;
};

void ring(Plan& plan, Ring& one) {
  unsigned flying = 0;
  uint64_t at = 0, size = 0;
  const auto more = [&] {
    if (!plan.take(at, size)) return false;
    if (plan.write) plan.look(at, size);
    one.ask(plan, at, size);
    ++flying;
    return true;
  };
  while (flying < plan.depth && more()) {
  }
  while (flying != 0) {
    const uint64_t where = one.answer(plan);
    --flying;
    more();  // before the processor looks at what has come
    if (!plan.write) plan.look(where, std::min(plan.block, plan.nbytes - where));
  }
}

double seconds(const timeval& time) {
  return static_cast<double>(time.tv_sec) + 1e-6 * static_cast<double>(time.tv_usec);
}

}  // namespace

int main(int count, char** words) {
  if (count != 8) return 2;
  Plan plan;
  const bool rings = std::string(words[1]) == "ring";
  plan.write = std::string(words[2]) == "write";
  plan.nbytes = std::strtoull(words[4], nullptr, 10), plan.block = std::strtoull(words[5], nullptr, 10);
  plan.threads = std::atoi(words[6]), plan.depth = std::atoi(words[7]);
  plan.memory = static_cast<std::byte*>(
      ::mmap(nullptr, plan.nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  ::madvise(plan.memory, plan.nbytes, MADV_HUGEPAGE);
  for (uint64_t at = 0; at < plan.nbytes; at += 8)
    *reinterpret_cast<uint64_t*>(plan.memory + at) = at * 0x9E3779B97F4A7C15;
  plan.fd = ::open(words[3], O_RDWR | O_CREAT | O_DIRECT, 0600);
  if (plan.fd < 0) fail(words[3], errno);
  if (plan.write && ::fallocate(plan.fd, 0, 0, static_cast<off_t>(plan.nbytes)) != 0)
    fail("fallocate", errno);
  rusage before{}, after{};
  ::getrusage(RUSAGE_SELF, &before);
  const auto start = std::chrono::steady_clock::now();
  std::vector<Ring> made;
  if (rings)
    for (unsigned k = 0; k < plan.threads; ++k) made.emplace_back(plan, true);
  std::vector<std::thread> threads;
  for (unsigned k = 0; k < plan.threads; ++k)
    threads.emplace_back([&, k] { rings ? ring(plan, made[k]) : pool(plan); });
  for (std::thread& thread : threads) thread.join();
  if (plan.write && ::fsync(plan.fd) != 0) fail("fsync", errno);
  const double wall = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  ::getrusage(RUSAGE_SELF, &after);
  const double cpu =
      seconds(after.ru_utime) - seconds(before.ru_utime) + seconds(after.ru_stime) - seconds(before.ru_stime);
  std::printf("%.6f %.6f %d\n", wall, cpu, rings && made[0].registered());
}
