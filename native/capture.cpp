#include "capture.hpp"

#include <algorithm>
#include <cstring>

#include "crc32c.hpp"
#include "error.hpp"
#include "tasks.hpp"

namespace zs {
namespace {

constexpr uint64_t kStreamed = 16 << 10;  // runs from this length on are checksummed while they are copied
constexpr uint64_t kWarm = 128 << 10;  // shorter ones afterwards, from a cache that surely still holds them
constexpr uint64_t kTask = 1 << 20;    // at-once copies are cut into tasks of about this much

// Many small sources lie anywhere in memory: asked for a few ahead, their bytes are there in time.
void fetch_ahead(const Arrays& sources, std::span<const uint32_t> pieces, size_t k) {
  constexpr size_t kAhead = 12;
  if (k + kAhead < pieces.size()) __builtin_prefetch(sources.data[pieces[k + kAhead]]);
}

// The at-once copies, when they are worth the help of the workers.
class AtOnce final : public Job {
 public:
  AtOnce(std::shared_ptr<Workers> workers, const Plan& plan, const Arrays& sources, std::byte* image,
         std::span<const uint32_t> pieces, std::vector<Task> tasks)
      : Job(std::move(workers), tasks.size()),
        plan_(plan),
        sources_(sources),
        image_(image),
        pieces_(pieces),
        tasks_(std::move(tasks)) {}

  void run_here() {
    workers_->add_first(shared_from_this());
    while (run_one()) {
    }
    wait_for(std::nullopt);
    rethrow();
  }

 protected:
  void work(uint64_t unit) override {
    const Task& task = tasks_[unit];
    for (size_t k = task.first; k < task.last; ++k) {
      const size_t piece = pieces_[k];
      fetch_ahead(sources_, pieces_, k);
      gather(image_ + plan_.offset(piece) + task.begin, sources_.data[piece], (*sources_.geometries)[piece],
             task.begin, std::min(task.end, plan_.size(piece)));
    }
  }

 private:
  const Plan& plan_;
  const Arrays& sources_;
  std::byte* image_;
  std::span<const uint32_t> pieces_;
  std::vector<Task> tasks_;
};

}  // namespace

std::shared_ptr<Capture> Capture::begin(const Pool& pool, std::shared_ptr<const Plan> plan, Arrays sources,
                                        std::byte* image, std::span<const uint32_t> at_once, int announce) {
  std::shared_ptr<Capture> capture(new Capture(pool, std::move(plan), std::move(sources), image));
  capture->announce_to(announce);
  capture->copy_at_once(at_once);
  capture->start();
  return capture;
}

Capture::Capture(const Pool& pool, std::shared_ptr<const Plan> plan, Arrays sources, std::byte* image)
    : Job(pool.workers(), plan->chunks()),
      plan_(std::move(plan)),
      sources_(std::move(sources)),
      image_(image),
      copied_(plan_->pieces()),
      checksums_(plan_->chunks()),
      unreleased_(plan_->chunks()) {
  if (sources_.data.size() != plan_->pieces())
    throw Error(Kind::usage, std::to_string(sources_.data.size()) + " tensors for a plan of " +
                                 std::to_string(plan_->pieces()) + " pieces");
  for (size_t k = 0; k < plan_->pieces(); ++k)
    if ((*sources_.geometries)[k].nbytes != plan_->size(k))
      throw Error(Kind::usage, "tensor " + std::to_string(k) + " has " +
                                   std::to_string((*sources_.geometries)[k].nbytes) +
                                   " bytes, its piece of the plan " + std::to_string(plan_->size(k)));
}

void Capture::copy_at_once(std::span<const uint32_t> at_once) {
  for (uint32_t piece : at_once) {
    if (piece >= plan_->pieces())
      throw Error(Kind::usage, "there is no piece " + std::to_string(piece) + " to copy at once");
    copied_[piece] = 1;
  }
  const std::vector<Task> tasks = cut_tasks(*plan_, at_once, kTask);
  if (tasks.size() <= 2) {  // waking a worker would take longer
    for (size_t k = 0; k < at_once.size(); ++k) {
      const uint32_t piece = at_once[k];
      fetch_ahead(sources_, at_once, k);
      gather(image_ + plan_->offset(piece), sources_.data[piece], (*sources_.geometries)[piece], 0,
             plan_->size(piece));
    }
    return;
  }
  std::make_shared<AtOnce>(workers_, *plan_, sources_, image_, at_once, tasks)->run_here();
}

// Brings one chunk into the image and takes its checksum. With `aside`, pieces come from a frozen chunk.
void Capture::pack(uint64_t chunk, const std::byte* aside) {
  const uint64_t begin = plan_->chunk_begin(chunk), end = plan_->chunk_end(chunk);
  uint64_t checked = begin;  // the checksum covers [begin, checked)
  uint32_t value = 0;
  const auto check_to = [&](uint64_t to) {
    value = crc32c(image_ + checked, to - checked, value);
    checked = to;
  };
  const auto written_to = [&](uint64_t to) {
    if (to - checked >= kWarm) check_to(to);
  };
  const auto copy = [&](uint64_t offset, const std::byte* from, uint64_t n) {
    if (n >= kStreamed) {
      check_to(offset);
      value = crc32c_copy(image_ + offset, from, n, value);
      checked = offset + n;
    } else {
      std::memcpy(image_ + offset, from, n);
      written_to(offset + n);
    }
  };
  plan_->runs(
      chunk,
      [&](uint64_t offset, uint64_t n) {
        copy(offset, reinterpret_cast<const std::byte*>(plan_->header().data()) + offset, n);
      },
      [&](size_t piece, uint64_t offset, uint64_t from, uint64_t to) {
        const Geometry& geometry = (*sources_.geometries)[piece];
        if (copied_[piece]) return written_to(offset + (to - from));
        if (aside != nullptr) return copy(offset, aside + (offset - begin), to - from);
        if (geometry.contiguous()) return copy(offset, sources_.data[piece] + from, to - from);
        gather(image_ + offset, sources_.data[piece], geometry, from, to);
        written_to(offset + (to - from));
      },
      [&](uint64_t offset, uint64_t n) {
        std::memset(image_ + offset, 0, n);
        written_to(offset + n);
      });
  check_to(end);
  checksums_[chunk] = value;
  add_progress(end - begin);
}

void Capture::work(uint64_t chunk) {
  try {
    pack(chunk, nullptr);
  } catch (...) {
    release(1);  // whoever waits in protect() must not wait for a chunk that failed
    throw;
  }
  release(1);
}

void Capture::skipped(uint64_t chunks) {
  release(chunks);
}

void Capture::release(uint64_t chunks) noexcept {
  if (unreleased_.fetch_sub(chunks, std::memory_order_acq_rel) != chunks) return;
  const std::lock_guard lock(release_mutex_);
  released_.notify_all();
}

bool Capture::freeze(uint64_t chunk) {
  const uint64_t begin = plan_->chunk_begin(chunk);
  try {
    Frozen frozen{chunk, workers_->spare->lend(plan_->chunk_bytes())};
    std::byte* const aside = frozen.bytes.data();
    plan_->runs(
        chunk, [](uint64_t, uint64_t) {},
        [&](size_t piece, uint64_t offset, uint64_t from, uint64_t to) {
          if (!copied_[piece])
            gather(aside + (offset - begin), sources_.data[piece], (*sources_.geometries)[piece], from, to);
        },
        [](uint64_t, uint64_t) {});
    const std::lock_guard lock(frozen_mutex_);
    frozen_.push_back(std::move(frozen));
  } catch (const std::bad_alloc&) {
    return false;  // no memory to spare: the caller helps instead
  }
  release(1);
  try {
    workers_->add(shared_from_this());  // they may have left the job when the last chunk was claimed
  } catch (const Error&) {
    while (work_aside()) {  // the pool is closed: nobody else will
    }
  }
  return true;
}

bool Capture::has_work() const {
  if (Job::has_work()) return true;
  const std::lock_guard lock(frozen_mutex_);
  return !frozen_.empty();
}

bool Capture::work_aside() {
  std::optional<Frozen> frozen;
  {
    const std::lock_guard lock(frozen_mutex_);
    if (frozen_.empty()) return false;
    frozen.emplace(std::move(frozen_.back()));
    frozen_.pop_back();
  }
  try {
    pack(frozen->chunk, frozen->bytes.data());
  } catch (...) {
    fail(std::current_exception());
  }
  frozen.reset();  // the memory is back before anyone hears of the end
  retire(1);
  return true;
}

Protection Capture::protect(uint64_t freeze_bytes) {
  Protection result;
  result.pending = unclaimed();
  while (const std::optional<uint64_t> chunk = claim()) {
    const uint64_t size = plan_->chunk_end(*chunk) - plan_->chunk_begin(*chunk);
    if (size <= freeze_bytes - result.frozen_bytes && freeze(*chunk)) {
      result.frozen_bytes += size;
    } else {
      run(*chunk);
      result.helped_bytes += size;
    }
  }
  if (unreleased_.load(std::memory_order_acquire) != 0) {
    const auto start = std::chrono::steady_clock::now();
    std::unique_lock lock(release_mutex_);
    released_.wait(lock, [this] { return unreleased_.load(std::memory_order_acquire) == 0; });
    result.waited = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  }
  return result;
}

}  // namespace zs
