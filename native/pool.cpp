#include "pool.hpp"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/timerfd.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "error.hpp"
#include "forks.hpp"

namespace zs {

namespace {

// Longer than what is left of `save` then.
constexpr std::chrono::microseconds kSoon{100};
constexpr unsigned kMostHaste = 4096;

// The coarse clock goes on once a tick.
std::chrono::nanoseconds behind_next_tick() {
  timespec tick{};
  if (::clock_getres(CLOCK_MONOTONIC_COARSE, &tick) != 0 || tick.tv_sec != 0) return kSoon;
  return std::chrono::nanoseconds(tick.tv_nsec) + std::chrono::milliseconds(1);
}

}  // namespace

Workers::Workers() : bell_(::timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC)), late_(behind_next_tick()) {
  if (bell_ < 0) throw system_error(Kind::capacity, "cannot make a timer for a pool of threads", errno);
}

Workers::~Workers() {
  ::close(bell_);
}

void Workers::insert(std::shared_ptr<Job> job) {
  if (std::find(jobs_.begin(), jobs_.end(), job) != jobs_.end()) return;
  const auto younger = [&job](const std::shared_ptr<Job>& other) { return other->sequence > job->sequence; };
  jobs_.insert(std::find_if(jobs_.begin(), jobs_.end(), younger), std::move(job));
}

void Workers::enter(std::shared_ptr<Job> job) {
  if (shut_) throw Error(Kind::usage, "the pool is closed");
  if (job->sequence == 0) job->sequence = ++sequence_;
  insert(std::move(job));
}

void Workers::add(std::shared_ptr<Job> job) {
  Whom whom;
  {
    const std::lock_guard lock(mutex_);
    enter(std::move(job));
    whom = idle();
  }
  wake(whom);  // the one that wakes wakes the next: cheaper for the caller than waking all
}

void Workers::add_soon(std::shared_ptr<Job> job) {
  Whom whom = Whom::nobody;
  bool late = false;
  {
    const std::lock_guard lock(mutex_);
    enter(std::move(job));
    if (!listened_) whom = idle();
    late = late_bell_ = haste_ == 0;
    if (!late) --haste_;
  }
  if (whom == Whom::nobody)
    ring_in(late ? late_
                 : kSoon);  // where nobody hears it, all are at work, and look for more before they rest
  else
    wake(whom);
}

void Workers::hurry() {
  {
    const std::lock_guard lock(mutex_);
    if (!std::exchange(late_bell_, false)) return;
  }
  ring_in(std::chrono::nanoseconds(1));
}

void Workers::hasten() {
  {
    const std::lock_guard lock(mutex_);
    haste_ = next_haste_;
    next_haste_ = std::min(2 * next_haste_, kMostHaste);
  }
  hurry();
}

void Workers::add_first(std::shared_ptr<Job> job) {
  Whom whom;
  {
    const std::lock_guard lock(mutex_);
    if (shut_) throw Error(Kind::usage, "the pool is closed");
    jobs_.push_front(std::move(job));
    whom = idle();
  }
  wake(whom);
}

Workers::Whom Workers::idle() const {
  if (idle_ > static_cast<size_t>(listened_)) return Whom::waiter;
  return listened_ ? Whom::listener : Whom::nobody;
}

void Workers::wake(Whom whom) {
  if (whom == Whom::waiter) work_.notify_one();
  if (whom == Whom::listener) ring_in(std::chrono::nanoseconds(1));
}

void Workers::ring_in(std::chrono::nanoseconds time) {
  itimerspec once{};
  once.it_value.tv_nsec = static_cast<long>(time.count());
  ::timerfd_settime(bell_, 0, &once, nullptr);
}

void Workers::rest(std::unique_lock<std::mutex>& lock) {
  ++idle_;
  if (listened_) {
    work_.wait(lock);
  } else {
    listened_ = true;
    lock.unlock();
    uint64_t rung = 0;
    [[maybe_unused]] const ssize_t heard = ::read(bell_, &rung, sizeof rung);
    lock.lock();
    listened_ = late_bell_ = false;
  }
  --idle_;
}

std::shared_ptr<Job> Workers::next() {
  while (!jobs_.empty()) {
    // Asked under the mutex: a job that gets more work adds itself again after that work can be seen.
    if (jobs_.front()->has_work()) return jobs_.front();
    // The last reference may die here; a Job's destructor touches no Workers.
    jobs_.pop_front();
  }
  return nullptr;
}

void Workers::serve() {
  std::unique_lock lock(mutex_);
  while (true) {
    std::shared_ptr<Job> job = next();
    if (!job) {
      if (shut_) return;
      rest(lock);
      continue;
    }
    const Whom whom = idle();
    lock.unlock();
    wake(whom);
    while (job->run_one()) {
    }
    job.reset();
    lock.lock();
  }
}

void Workers::shut() {
  std::list<std::shared_ptr<Job>> left;
  {
    const std::lock_guard lock(mutex_);
    shut_ = true;
    left = jobs_;
  }
  const auto error =
      std::make_exception_ptr(Error(Kind::usage, "the pool was closed before the job had ended"));
  for (const std::shared_ptr<Job>& job : left)
    if (job->has_work()) job->fail(error);
  work_.notify_all();
  ring_in(std::chrono::nanoseconds(1));
}

Pool::Pool(const std::string& name, unsigned threads, bool awaited) : count_(threads), owner_(forks()) {
  if (threads == 0) throw Error(Kind::usage, "a pool needs at least one thread");
  workers_ = new std::shared_ptr<Workers>(std::make_shared<Workers>());
  threads_ = new std::vector<std::thread>();
  // Signals are for the interpreter's main thread: a worker that took one would delay Ctrl-C.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  try {
    for (unsigned i = 0; i < threads; ++i) {
      threads_->emplace_back([workers = *workers_] { workers->serve(); });
      pthread_setname_np(threads_->back().native_handle(), name.substr(0, 15).c_str());
      // A batch thread that wakes up does not push the thread that woke it (training) off its core. A refusal
      // costs only that.
      const sched_param plain{};
      if (!awaited) pthread_setschedparam(threads_->back().native_handle(), SCHED_BATCH, &plain);
    }
  } catch (...) {
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    close();
    delete workers_;
    delete threads_;
    throw Error(Kind::capacity, "cannot start " + std::to_string(threads) + " threads for pool " + name);
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

const std::shared_ptr<Workers>& Pool::workers() const {
  if (forks() != owner_)
    throw Error(Kind::usage, "the pool's threads are in the process that forked this one");
  return *workers_;
}

void Pool::close() {
  if (forks() != owner_) return;
  (*workers_)->shut();
  for (std::thread& thread : *threads_) thread.join();
  threads_->clear();
}

Pool::~Pool() {
  if (forks() != owner_) return;
  close();
  delete workers_;
  delete threads_;
}

}  // namespace zs
