// What a job's threads take turns with.
#pragma once
#include <mutex>
#include <utility>
#include <vector>

namespace zs {

// As many as there are threads, so that there is always one.
template <class T>
class Idle {
 public:
  // One of them for as long as one unit lasts.
  class Lease {
   public:
    explicit Lease(Idle& idle) : held(idle.take()), idle_(idle) {}
    Lease(const Lease&) = delete;
    Lease& operator=(const Lease&) = delete;
    ~Lease() {
      const std::lock_guard lock(idle_.mutex_);
      idle_.idle_.push_back(held);
    }
    const T held;

   private:
    Idle& idle_;
  };

  // Before the first lease, and after the last.
  std::vector<T>& all() { return idle_; }

 private:
  T take() {
    const std::lock_guard lock(mutex_);
    T one = std::move(idle_.back());
    idle_.pop_back();
    return one;
  }

  std::mutex mutex_;
  std::vector<T> idle_;
};

}  // namespace zs
