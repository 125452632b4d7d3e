#include "pool.hpp"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>

#include "error.hpp"

namespace zs {

void Workers::insert(std::shared_ptr<Job> job) {
  if (std::find(jobs_.begin(), jobs_.end(), job) != jobs_.end()) return;
  const auto younger = [&job](const std::shared_ptr<Job>& other) { return other->sequence > job->sequence; };
  jobs_.insert(std::find_if(jobs_.begin(), jobs_.end(), younger), std::move(job));
}

void Workers::add(std::shared_ptr<Job> job) {
  {
    const std::lock_guard lock(mutex_);
    if (shut_) throw Error(Kind::usage, "the pool is closed");
    if (job->sequence == 0) job->sequence = ++sequence_;
    insert(std::move(job));
    if (idle_ == 0) return;
  }
  work_.notify_one();  // the one that wakes wakes the next: cheaper for the caller than waking all
}

void Workers::add_first(std::shared_ptr<Job> job) {
  {
    const std::lock_guard lock(mutex_);
    if (shut_) throw Error(Kind::usage, "the pool is closed");
    jobs_.push_front(std::move(job));
    if (idle_ == 0) return;
  }
  work_.notify_one();
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
      ++idle_;
      work_.wait(lock);
      --idle_;
      continue;
    }
    const bool wake = idle_ != 0;
    lock.unlock();
    if (wake) work_.notify_one();
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
}

Pool::Pool(const std::string& name, unsigned threads, bool awaited) : count_(threads), owner_(::getpid()) {
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
  if (::getpid() != owner_)
    throw Error(Kind::usage, "the pool's threads are in the process that forked this one");
  return *workers_;
}

void Pool::close() {
  if (::getpid() != owner_) return;
  (*workers_)->shut();
  for (std::thread& thread : *threads_) thread.join();
  threads_->clear();
}

Pool::~Pool() {
  if (::getpid() != owner_) return;
  close();
  delete workers_;
  delete threads_;
}

}  // namespace zs
