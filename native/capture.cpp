#include "capture.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

#include "crc32c.hpp"
#include "error.hpp"
#include "prefetch.hpp"
#include "tasks.hpp"

namespace zs {
namespace {

constexpr uint64_t kStreamed = 16 << 10;  // runs from this length on are checksummed while they are copied
constexpr uint64_t kWarm = 128 << 10;  // shorter ones afterwards, from a cache that surely still holds them
constexpr uint64_t kTask = 1 << 20;    // at-once copies are cut into tasks of about this much

// Many small sources lie anywhere in memory: asked for a few ahead, their bytes are there in time.
[[gnu::always_inline]] inline void fetch_ahead(const Arrays& sources, std::span<const uint32_t> pieces,
                                               size_t k) {
  constexpr size_t kAhead = 12;
  if (k + kAhead < pieces.size()) prefetch(sources.data[pieces[k + kAhead]]);
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
                                        std::byte* image, std::span<const uint32_t> at_once, int announce,
                                        std::vector<Training> trainings, uint64_t ahead, bool held) {
  check(*plan, sources, at_once, trainings);
  std::vector<Drain> drains;
  for (Training& training : trainings) {
    Drain drain = drain_of(*plan, sources, image, at_once, std::move(training), ahead);
    if (!drain.lane->parts.empty()) drains.push_back(std::move(drain));
  }
  std::shared_ptr<Capture> capture(
      new Capture(pool, std::move(plan), std::move(sources), image, std::move(drains)));
  capture->announce_to(announce);
  try {
    capture->start_lanes();
    capture->copy_at_once(at_once);
  } catch (...) {
    capture->announce_to(-1);
    capture->cancel();
    capture->wait_for(std::nullopt);  // a lane may have begun to read
    throw;
  }
  if (!held) capture->start();
  return capture;
}

void Capture::check(const Plan& plan, const Arrays& sources, std::span<const uint32_t> at_once,
                    std::span<const Training> trainings) {
  check_devices(sources, trainings);
  if (sources.data.size() != plan.pieces())
    throw Error(Kind::usage, std::to_string(sources.data.size()) + " tensors for a plan of " +
                                 std::to_string(plan.pieces()) + " pieces");
  plan.check(sources.geometries);
  for (uint32_t piece : at_once)
    if (piece >= plan.pieces())
      throw Error(Kind::usage, "there is no piece " + std::to_string(piece) + " to copy at once");
}

namespace {
template <class Drains>
uint64_t parts_of(const Drains& drains) {
  uint64_t parts = 0;
  for (const auto& drain : drains) parts += drain.lane->parts.size();
  return parts;
}
}  // namespace

Capture::Capture(const Pool& pool, std::shared_ptr<const Plan> plan, Arrays sources, std::byte* image,
                 std::vector<Drain> drains)
    : Job(pool.workers(), plan->chunks() + parts_of(drains), parts_of(drains)),
      plan_(std::move(plan)),
      sources_(std::move(sources)),
      image_(image),
      copied_(plan_->pieces()),
      checksums_(plan_->chunks()),
      drains_(std::move(drains)),
      unreleased_(plan_->chunks()) {
  if (drains_.empty()) return;
  missing_ = std::make_unique<std::atomic<uint32_t>[]>(plan_->chunks());
  for (const Drain& drain : drains_)
    for (const Lane::Part& part : drain.lane->parts) {
      std::atomic<uint32_t>& missing = missing_[part.name];
      missing.store(std::max(missing.load(), 1u) + 1);  // the host's, and one for each lane
    }
}

Capture::~Capture() = default;

void Capture::copy_at_once(std::span<const uint32_t> all) {
  std::vector<uint32_t> on_host;  // only where some are not: this is the training thread
  std::span<const uint32_t> at_once = all;
  for (uint32_t piece : all) copied_[piece] = 1;
  if (!drains_.empty()) {
    for (uint32_t piece : all)
      if (sources_.place(piece) == Arrays::kHost) on_host.push_back(piece);
    at_once = on_host;
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

bool Capture::bring(uint64_t chunk) noexcept {
  return missing_[chunk].fetch_sub(1, std::memory_order_acq_rel) == 1;
}

void Capture::check_chunk(uint64_t chunk) {
  const uint64_t begin = plan_->chunk_begin(chunk), end = plan_->chunk_end(chunk);
  checksums_[chunk] = crc32c(image_ + begin, end - begin);
  add_progress(end - begin);
}

// Bytes of sources in host memory that the chunk has still to be brought from.
uint64_t Capture::host_bytes(uint64_t chunk) const {
  if (!on_lane(chunk)) return plan_->chunk_end(chunk) - plan_->chunk_begin(chunk);
  uint64_t nbytes = 0;
  plan_->runs(
      chunk, [](uint64_t, uint64_t) {},
      [&](size_t piece, uint64_t, uint64_t from, uint64_t to) {
        if (!copied_[piece] && sources_.place(piece) == Arrays::kHost) nbytes += to - from;
      },
      [](uint64_t, uint64_t) {});
  return nbytes;
}

// Brings a chunk's host memory into the image, and takes its checksum where that was all. With `aside`,
// pieces come from a frozen chunk.
void Capture::pack(uint64_t chunk, const std::byte* aside) {
  const uint64_t begin = plan_->chunk_begin(chunk), end = plan_->chunk_end(chunk);
  const bool shared = on_lane(chunk);
  uint64_t checked = begin;  // the checksum covers [begin, checked)
  uint32_t value = 0;
  const auto check_to = [&](uint64_t to) {
    value = crc32c(image_ + checked, to - checked, value);
    checked = to;
  };
  const auto written_to = [&](uint64_t to) {
    if (!shared && to - checked >= kWarm) check_to(to);
  };
  const auto copy = [&](uint64_t offset, const std::byte* from, uint64_t n) {
    if (n >= kStreamed && !shared) {
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
        if (copied_[piece] || sources_.place(piece) != Arrays::kHost) return written_to(offset + (to - from));
        if (aside != nullptr) return copy(offset, aside + (offset - begin), to - from);
        if (geometry.contiguous()) return copy(offset, sources_.data[piece] + from, to - from);
        gather(image_ + offset, sources_.data[piece], geometry, from, to);
        written_to(offset + (to - from));
      },
      [&](uint64_t offset, uint64_t n) {
        std::memset(image_ + offset, 0, n);
        written_to(offset + n);
      });
  if (shared) {
    if (bring(chunk)) check_chunk(chunk);
    return;
  }
  check_to(end);
  checksums_[chunk] = value;
  add_progress(end - begin);
}

void Capture::work(uint64_t chunk) {
  try {
    pack(chunk, nullptr);
  } catch (...) {
    released(1);  // whoever waits in protect() must not wait for a chunk that failed
    throw;
  }
  released(1);
}

void Capture::skipped(uint64_t chunks) {
  released(chunks);
}

void Capture::released(uint64_t chunks) noexcept {
  if (unreleased_.fetch_sub(chunks, std::memory_order_acq_rel) != chunks) return;
  const std::lock_guard lock(release_mutex_);
  all_released_.notify_all();
}

bool Capture::freeze(uint64_t chunk) {
  const uint64_t begin = plan_->chunk_begin(chunk);
  try {
    Frozen frozen{chunk, workers_->spare->lend(plan_->chunk_bytes())};
    std::byte* const aside = frozen.bytes.data();
    plan_->runs(
        chunk, [](uint64_t, uint64_t) {},
        [&](size_t piece, uint64_t offset, uint64_t from, uint64_t to) {
          if (!copied_[piece] && sources_.place(piece) == Arrays::kHost)
            gather(aside + (offset - begin), sources_.data[piece], (*sources_.geometries)[piece], from, to);
        },
        [](uint64_t, uint64_t) {});
    set_aside(std::move(frozen));
  } catch (const std::bad_alloc&) {
    return false;  // no memory to spare: the caller helps instead
  }
  released(1);
  return true;
}

void Capture::set_aside(Frozen frozen) {
  {
    const std::lock_guard lock(aside_mutex_);
    frozen_.push_back(std::move(frozen));
  }
  try {
    workers_->add(shared_from_this());  // they may have left the job when the last chunk was claimed
  } catch (const Error&) {
    while (work_aside()) {  // the pool is closed: nobody else will
    }
  }
}

bool Capture::has_work() const {
  if (Job::has_work()) return true;
  const std::lock_guard lock(aside_mutex_);
  return !frozen_.empty() || !landed_.empty();
}

bool Capture::work_aside() {
  std::optional<Frozen> frozen;
  uint64_t chunk = 0;
  {
    const std::lock_guard lock(aside_mutex_);
    if (frozen_.empty() && landed_.empty()) return false;
    if (!frozen_.empty()) {
      frozen.emplace(std::move(frozen_.back()));
      frozen_.pop_back();
    } else {
      chunk = landed_.back();
      landed_.pop_back();
    }
  }
  if (!frozen) {
    check_chunk(chunk);
    retire(1);
    return true;
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

Protection Capture::protect(uint64_t freeze_bytes, std::span<const Training> trainings,
                            const Spared& spared) {
  Protection result;
  const std::vector<uint8_t> marks = marks_of(spared);
  if (!marks.empty()) {  // a claimed chunk must not be lost for want of memory
    const std::lock_guard lock(aside_mutex_);
    frozen_.reserve(frozen_.size() + unclaimed());
    parked_.reserve(unclaimed());
    kept_.assign(spared.kept.begin(), spared.kept.end());
  }
  for (const Drain& drain : drains_) {
    const CUstream stream = stream_of(drain, trainings);
    const Redirection redirected =
        drain.training.device->protect(*drain.lane, stream, freeze_bytes, sparing_of(drain, marks));
    result.pending += redirected.pending;
    result.frozen_bytes += redirected.frozen_bytes;
    result.spared_bytes += redirected.spared_bytes;
  }
  if (drains_.empty()) result.pending = unclaimed();
  uint64_t left = freeze_bytes;
  while (const std::optional<uint64_t> chunk = claim()) {
    const uint64_t size = host_bytes(*chunk);
    if (!drains_.empty() && size != 0) ++result.pending;
    if (spare(*chunk, marks))
      result.spared_bytes += size;
    else if (size != 0 && size <= left && freeze(*chunk)) {
      left -= size;
      result.frozen_bytes += size;
    } else {
      run(*chunk);
      result.helped_bytes += size;
    }
  }
  if (unreleased_.load(std::memory_order_acquire) != 0) {
    const auto start = std::chrono::steady_clock::now();
    std::unique_lock lock(release_mutex_);
    all_released_.wait(lock, [this] { return unreleased_.load(std::memory_order_acquire) == 0; });
    result.waited = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  }
  return result;
}

}  // namespace zs
