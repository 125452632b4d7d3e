// Named worker threads that several jobs share, the oldest first.
#pragma once
#include <sys/types.h>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "job.hpp"

namespace zs {

// What the threads and the jobs share. It outlives the Pool for as long as one of them holds it.
//
// Whoever wakes a thread may lose its own core to it, at once and for a whole slice of the scheduler's (3
// ms), whatever their policies. So the training thread wakes nobody while `save` runs: it sets a bell, a
// timer for which one of the idle workers listens; the others wait to be woken by one of their own.
//
// To set it 100 us ahead takes 14 us in a virtual machine, where it is an exit to program a timer; 4 us where
// the scheduler's next tick comes sooner anyway. So it rings behind that tick, some milliseconds later, as
// long as nobody has been kept waiting.
class Workers {
 public:
  Workers();
  Workers(const Workers&) = delete;
  Workers& operator=(const Workers&) = delete;
  ~Workers();
  void add(std::shared_ptr<Job> job);       // also again, when a job has got more work; throws when closed
  void add_soon(std::shared_ptr<Job> job);  // likewise; it is begun a moment later, or upon hurry()
  void hurry();                             // somebody waits for what was added soon
  void hasten();                            // likewise; and the next ones shall be begun sooner
  void add_first(
      std::shared_ptr<Job> job);  // before all others: somebody waits for it on the training thread
  void serve();                   // the life of a worker
  void shut();                    // no more jobs; those that wait fail, units in flight end

 private:
  enum class Whom : uint8_t { nobody, waiter, listener };

  // With mutex_ held.
  void enter(std::shared_ptr<Job> job);
  void insert(std::shared_ptr<Job> job);
  std::shared_ptr<Job> next();
  void rest(std::unique_lock<std::mutex>& lock);
  Whom idle() const;

  void wake(Whom whom);
  void ring_in(std::chrono::nanoseconds time);

  const int bell_;                       // a timerfd
  const std::chrono::nanoseconds late_;  // behind the scheduler's next tick
  std::mutex mutex_;
  std::condition_variable work_;
  std::list<std::shared_ptr<Job>> jobs_;  // by age
  uint64_t sequence_ = 0;
  size_t idle_ = 0;        // the listener too
  bool listened_ = false;  // somebody hears the bell
  bool shut_ = false;
  bool late_bell_ = false;  // one was set that may not have rung yet
  unsigned haste_ = 4;      // how many of the next bells ring soon
  unsigned next_haste_ = 32;
};

class Pool {
 public:
  // Thread names are cut to 15 bytes. `awaited`: training waits for what the pool does, and its threads may
  // push others off their cores; else they never do that to the thread that woke them.
  Pool(const std::string& name, unsigned threads, bool awaited = false);
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;
  ~Pool();
  void close();  // idempotent; joins the threads
  const std::shared_ptr<Workers>& workers()
      const;  // throws in a forked child, where nobody would do the work
  unsigned threads() const { return count_; }

 private:
  // On the heap so that a forked child can leave them be: it has none of the threads, and must neither join
  // them nor destroy a condition variable on which they seem to wait.
  std::shared_ptr<Workers>* workers_;
  std::vector<std::thread>* threads_;
  unsigned count_;
  uint32_t owner_;  // as forks() says
};

}  // namespace zs
