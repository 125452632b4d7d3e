// Streams and events of the stand-in driver: a thread plays each stream.
#pragma once
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>

#include "fake.hpp"

namespace fake {

class Stream {
 public:
  Stream() : thread_([this] { serve(); }) {}
  ~Stream() {
    {
      const std::lock_guard lock(mutex_);
      stop_ = true;
    }
    wake_.notify_all();
    thread_.join();
  }
  void add(std::function<void()> work) {
    {
      const std::lock_guard lock(mutex_);
      work_.push_back(std::move(work));
    }
    wake_.notify_all();
  }
  bool idle() {
    const std::lock_guard lock(mutex_);
    return work_.empty();
  }
  void wait() {
    std::unique_lock lock(mutex_);
    wake_.wait(lock, [this] { return work_.empty(); });
  }
  std::atomic<bool> capturing{false};
  std::atomic<int> error{0};  // of a copy that failed while it ran

 private:
  void serve() {
    std::unique_lock lock(mutex_);
    while (true) {
      wake_.wait(lock, [this] { return stop_ || !work_.empty(); });
      if (work_.empty()) return;
      const std::function<void()> work = work_.front();
      lock.unlock();
      work();
      lock.lock();
      work_.pop_front();
      wake_.notify_all();
    }
  }
  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<std::function<void()>> work_;
  bool stop_ = false;
  std::thread thread_;
};

Stream* stream_of(CUstream stream);  // nullptr: the legacy default stream

// The stream runs it in its turn, after a delay; false: it touched memory that it must not.
void queue_kernel(CUstream stream, std::function<bool()> kernel);

void await_copies_gate();  // what every copy waits for
void open_gate();
void forget_errors();  // of all streams

}  // namespace fake
