#include "job.hpp"

#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>

#include "error.hpp"
#include "pool.hpp"

namespace zs {

Job::Job(std::shared_ptr<Workers> workers, uint64_t units, uint64_t kept)
    : workers_(std::move(workers)), units_(units - kept), empty_(units == 0), remaining_(units) {}

Job::~Job() {
  if (eventfd_ >= 0) ::close(eventfd_);
}

void Job::start() {
  if (empty_) return complete();
  workers_->add(shared_from_this());
}

void Job::start_soon() {
  if (empty_) return complete();
  workers_->add_soon(shared_from_this());
}

std::optional<uint64_t> Job::claim() noexcept {
  // Looking first keeps the counter from running away while idle threads ask again and again.
  if (next_.load(std::memory_order_relaxed) >= units_) return std::nullopt;
  const uint64_t unit = next_.fetch_add(1, std::memory_order_relaxed);
  if (unit >= units_) return std::nullopt;
  return unit;
}

uint64_t Job::unclaimed() const noexcept {
  const uint64_t next = next_.load(std::memory_order_relaxed);
  return next < units_ ? units_ - next : 0;
}

bool Job::has_work() const {
  return unclaimed() != 0 && !held_.load(std::memory_order_relaxed);
}

void Job::go_on() {
  held_.store(false, std::memory_order_relaxed);
  if (has_work()) workers_->add(shared_from_this());  // they may have let go of it
}

bool Job::run_one() {
  if (held_.load(std::memory_order_relaxed)) return false;
  if (work_aside()) return true;
  const std::optional<uint64_t> unit = claim();
  if (!unit) return false;
  run(*unit);
  return true;
}

void Job::run(uint64_t unit) noexcept {
  try {
    work(unit);
  } catch (...) {
    fail(std::current_exception());
  }
  retire(1);
}

void Job::retire(uint64_t units) noexcept {
  if (units != 0 && remaining_.fetch_sub(units, std::memory_order_acq_rel) == units) complete();
}

void Job::complete() noexcept {
  try {
    close(!failed() && !cancelled());
  } catch (...) {
    fail(std::current_exception());
  }
  const std::lock_guard lock(mutex_);
  done_.store(true, std::memory_order_release);
  ended_.notify_all();
  if (eventfd_ >= 0) ::eventfd_write(eventfd_, 1);
  if (announced_ >= 0) ::eventfd_write(announced_, 1);
}

bool Job::failed() const noexcept {
  const std::lock_guard lock(mutex_);
  return error_ != nullptr;
}

void Job::fail(std::exception_ptr error) noexcept {
  {
    const std::lock_guard lock(mutex_);
    if (!error_) error_ = std::move(error);
  }
  drop_unclaimed(false);
}

void Job::cancel() noexcept {
  drop_unclaimed(true);
}

void Job::drop_unclaimed(bool on_request) noexcept {
  const uint64_t next = next_.exchange(units_, std::memory_order_relaxed);
  const uint64_t unclaimed = next < units_ ? units_ - next : 0;
  const uint64_t kept = drop_kept();
  if (unclaimed + kept == 0) return;
  if (on_request) cancelled_.store(true, std::memory_order_relaxed);
  if (unclaimed != 0) skipped(unclaimed);
  retire(unclaimed + kept);
}

bool Job::wait_for(std::optional<std::chrono::nanoseconds> timeout) {
  std::unique_lock lock(mutex_);
  const auto ended = [this] { return done(); };
  if (timeout) return ended_.wait_for(lock, *timeout, ended);
  ended_.wait(lock, ended);
  return true;
}

void Job::rethrow() const {
  std::exception_ptr error;
  {
    const std::lock_guard lock(mutex_);
    error = error_;
  }
  if (error) std::rethrow_exception(error);
}

int Job::fileno() {
  const std::lock_guard lock(mutex_);
  if (eventfd_ < 0) {
    eventfd_ = ::eventfd(done() ? 1 : 0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (eventfd_ < 0) throw system_error(Kind::capability, "cannot make an eventfd for a job", errno);
  }
  return eventfd_;
}

bool Job::work_aside() {
  return false;
}
void Job::skipped(uint64_t) {}
uint64_t Job::drop_kept() noexcept {
  return 0;
}
void Job::close(bool) {}

}  // namespace zs
