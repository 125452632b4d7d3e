// Work that goes on in the background: the one shape of asynchrony in the core.
#pragma once
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>

namespace zs {

class Workers;

// A job is cut into units. Threads claim one after another from a single counter, so that each unit is begun
// exactly once, by a worker or by a caller that helps. The first error is kept, keeps the rest from
// beginning, and is thrown by every wait.
//
// | verb     | before the last unit has ended     | after                     |
// |----------|------------------------------------|---------------------------|
// | done     | false                              | true                      |
// | wait_for | sleeps                             | true at once              |
// | rethrow  | –                                  | throws the kept error     |
// | cancel   | no further unit begins             | nothing                   |
// | hold     | none begins until go_on            | nothing                   |
// | fileno   | eventfd, not readable              | eventfd, readable         |
class Job : public std::enable_shared_from_this<Job> {
 public:
  Job(const Job&) = delete;
  Job& operator=(const Job&) = delete;
  virtual ~Job();

  bool done() const noexcept { return done_.load(std::memory_order_acquire); }
  bool wait_for(std::optional<std::chrono::nanoseconds> timeout);  // false: not done in time. Throws nothing.
  void rethrow() const;
  // Whether cancel() came in time to keep something from being done.
  bool cancelled() const noexcept { return cancelled_.load(std::memory_order_relaxed); }
  void cancel() noexcept;
  // No further unit begins until go_on(); what is in flight ends. The threads do other jobs meanwhile.
  void hold() noexcept { held_.store(true, std::memory_order_relaxed); }
  void go_on();
  int fileno();
  uint64_t nbytes_done() const noexcept { return nbytes_done_.load(std::memory_order_relaxed); }

  // For Workers and helping callers.
  bool run_one();                 // claims and runs one unit; false: none was left
  virtual bool has_work() const;  // whether run_one would find something
  void fail(std::exception_ptr error) noexcept;
  uint64_t sequence = 0;  // age within the pool; owned by Workers

 protected:
  // The last `kept` units are claimed by nobody: the job retires them itself.
  explicit Job(std::shared_ptr<Workers> workers, uint64_t units, uint64_t kept = 0);
  void announce_to(int eventfd) noexcept {
    announced_ = eventfd;
  }  // 1 is added to it at the end; before start
  void start();       // hands the job to the workers; the last statement of whoever builds one
  void start_soon();  // without waking any of them now
  std::optional<uint64_t> claim() noexcept;
  uint64_t unclaimed() const noexcept;
  void run(uint64_t unit) noexcept;  // a claimed one
  void retire(uint64_t units) noexcept;
  void add_progress(uint64_t nbytes) noexcept { nbytes_done_.fetch_add(nbytes, std::memory_order_relaxed); }
  bool failed() const noexcept;

  virtual void work(uint64_t unit) = 0;  // may throw
  virtual bool work_aside();             // work that is no unit: done before any unit; false: none
  virtual void skipped(uint64_t units);  // claimed by cancel: these will never be worked on
  // Gives up kept units that have not begun and says how many; the caller retires them.
  virtual uint64_t drop_kept() noexcept;
  virtual void close(bool whole);  // after the last unit, once, by the thread that did it; may throw

  const std::shared_ptr<Workers> workers_;
  const uint64_t units_;  // all but the kept ones

 private:
  void complete() noexcept;
  void drop_unclaimed(bool on_request) noexcept;

  const bool empty_;
  std::atomic<uint64_t> next_{0};
  std::atomic<uint64_t> remaining_;
  std::atomic<uint64_t> nbytes_done_{0};
  std::atomic<bool> cancelled_{false};
  std::atomic<bool> held_{false};
  std::atomic<bool> done_{false};
  mutable std::mutex mutex_;
  std::condition_variable ended_;
  std::exception_ptr error_;
  int eventfd_ = -1;
  int announced_ = -1;  // somebody else's
};

}  // namespace zs
