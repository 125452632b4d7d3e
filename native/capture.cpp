#include "capture.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

#include "crc32c.hpp"
#include "error.hpp"

namespace zs {
namespace {

constexpr uint64_t kStreamed = 16 << 10;  // runs from this length on are checksummed while they are copied
constexpr uint64_t kWarm = 128 << 10;  // shorter ones afterwards, from a cache that surely still holds them

}  // namespace

std::shared_ptr<Capture> Capture::begin(const Pool& pool, std::shared_ptr<const Plan> plan, Arrays sources,
                                        std::byte* image, const Pieces& pieces, int announce,
                                        std::vector<Training> trainings, uint64_t ahead, bool held,
                                        Sampling sampling, CUdeviceptr peer, Room room) {
  check(*plan, sources, trainings);
  std::shared_ptr<const AtOnce> at_once = plan->at_once(sources, pieces);
  std::vector<Drain> drains;
  for (Training& training : trainings) {
    Drain drain = drain_of(*plan, sources, image, *at_once, std::move(training), ahead, peer);
    drain.lane->sampling = sampling;
    if (drain.lane->coming != 0) drains.push_back(std::move(drain));
  }
  std::shared_ptr<Capture> capture(new Capture(pool, std::move(plan), std::move(sources), image,
                                               std::move(at_once), std::move(drains), peer, std::move(room)));
  capture->announce_to(announce);
  try {
    capture->start_lanes();
    capture->copy_at_once();
  } catch (...) {
    capture->announce_to(-1);
    capture->cancel();
    capture->wait_for(std::nullopt);  // a lane may have begun to read
    throw;
  }
  if (!held) capture->start();
  return capture;
}

void Capture::check(const Plan& plan, const Arrays& sources, std::span<const Training> trainings) {
  check_devices(sources, trainings);
  if (sources.data.size() != plan.pieces())
    throw Error(Kind::usage, std::to_string(sources.data.size()) + " tensors for a plan of " +
                                 std::to_string(plan.pieces()) + " pieces");
  plan.check(sources.geometries);
}

namespace {
template <class Drains>
uint64_t parts_of(const Drains& drains) {
  uint64_t parts = 0;
  for (const auto& drain : drains) parts += drain.lane->coming;
  return parts;
}
}  // namespace

Capture::Capture(const Pool& pool, std::shared_ptr<const Plan> plan, Arrays sources, std::byte* image,
                 std::shared_ptr<const AtOnce> at_once, std::vector<Drain> drains, CUdeviceptr peer,
                 Room room)
    : Job(pool.workers(), plan->chunks() + parts_of(drains), parts_of(drains)),
      plan_(std::move(plan)),
      sources_(std::move(sources)),
      at_once_(std::move(at_once)),
      image_(image),
      peer_(peer),
      checksums_(std::move(room.checksums)),
      drains_(std::move(drains)),
      arriving_(parts_of(drains_)),
      threads_(pool.threads()),
      unreleased_(plan_->chunks()) {
  checksums_.assign(plan_->chunks(), 0);
  if (drains_.empty()) return;
  missing_ = std::move(room.missing);
  if (!missing_) missing_ = std::make_unique<std::atomic<uint32_t>[]>(plan_->chunks());
  for (uint64_t k = 0; k < plan_->chunks(); ++k) missing_[k].store(0, std::memory_order_relaxed);
  for (const Drain& drain : drains_)
    for (const Route::Part& part : drain.route->parts) {
      std::atomic<uint32_t>& missing = missing_[part.chunk];  // the host's, and one for each lane
      missing.store(std::max(missing.load(std::memory_order_relaxed), 1u) + 1, std::memory_order_relaxed);
    }
}

Capture::~Capture() {
  plan_->give_back({std::move(sources_.data), std::move(checksums_), std::move(missing_)});
}

void Capture::copy_at_once() {
  if (at_once_->tiny_bytes != 0) {
    beside_ = std::make_unique_for_overwrite<std::byte[]>(at_once_->tiny_bytes);
    at_once_->gather_tiny(sources_, beside_.get());
  }
  at_once_->place_others(*plan_, sources_, image_, workers_);
}

bool Capture::bring(uint64_t chunk) noexcept {
  return missing_[chunk].fetch_sub(1, std::memory_order_acq_rel) == 1;
}

void Capture::check_chunk(uint64_t chunk) {
  const uint64_t begin = plan_->chunk_begin(chunk), end = plan_->chunk_end(chunk);
  if (!to_peer()) checksums_[chunk] = crc32c(image_ + begin, end - begin);
  add_progress(end - begin);
}

// Bytes of sources in host memory that the chunk has still to be brought from.
uint64_t Capture::host_bytes(uint64_t chunk) const {
  if (!on_lane(chunk)) return plan_->chunk_end(chunk) - plan_->chunk_begin(chunk);
  uint64_t nbytes = 0;
  plan_->runs(
      chunk, [](uint64_t, uint64_t) {},
      [&](size_t piece, uint64_t, uint64_t from, uint64_t to) {
        if (!copied(piece) && sources_.place(piece) == Arrays::kHost) nbytes += to - from;
      },
      [](uint64_t, uint64_t) {});
  return nbytes;
}

// Brings a chunk's host memory into the image, and takes its checksum where that was all.
void Capture::pack(uint64_t chunk) {
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
        if (at_once_->marks[piece] == AtOnce::kPlaced || sources_.place(piece) != Arrays::kHost)
          return written_to(offset + (to - from));
        const Geometry& geometry = (*sources_.geometries)[piece];
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
    pack(chunk);
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

// The whole of a chunk that nobody changes.
void Capture::read_later(uint64_t chunk) noexcept {
  {
    const std::lock_guard lock(aside_mutex_);
    spared_.push_back(chunk);
  }
  ask_for_workers();
}

void Capture::ask_for_workers() noexcept {
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
  return !spared_.empty() || (!landed_.empty() && may_check());
}

// What arrives and what is read for its checksum share the memory's bandwidth: on a machine whose GPUs all
// drain at once, half of the threads leave the links at full speed, and all of them do not. With aside_mutex_
// held.
bool Capture::may_check() const {
  return checking_ < (arriving_ == 0 ? threads_ : std::max(1u, threads_ / 2));
}

bool Capture::work_aside() {
  uint64_t chunk = 0;
  bool whole = false;
  {
    const std::lock_guard lock(aside_mutex_);
    whole = !spared_.empty();
    std::vector<uint64_t>& from = whole ? spared_ : landed_;
    if (from.empty() || (!whole && !may_check())) return false;
    chunk = from.back();
    from.pop_back();
    checking_ += !whole;
  }
  try {
    if (whole)
      pack(chunk);
    else
      check_chunk(chunk);
  } catch (...) {
    fail(std::current_exception());
  }
  if (!whole) {
    const std::lock_guard lock(aside_mutex_);
    --checking_;
  }
  retire(1);
  return true;
}

Protection Capture::protect(uint64_t freeze_bytes, std::span<const Training> trainings,
                            const Spared& spared) {
  Protection result;
  const std::vector<uint8_t> marks = marks_of(spared);
  if (!marks.empty()) {  // a claimed chunk must not be lost for want of memory
    const std::lock_guard lock(aside_mutex_);
    spared_.reserve(spared_.size() + unclaimed());
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
  if (drains_.empty() && result.pending > 1) workers_->hurry();  // they help
  while (const std::optional<uint64_t> chunk = claim()) {
    const uint64_t size = host_bytes(*chunk);
    if (!drains_.empty() && size != 0) ++result.pending;
    if (spare(*chunk, marks)) {
      result.spared_bytes += size;
    } else {  // no memory is nearer than its place in the image: in the host's there is nothing to freeze to
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
  if (drains_.empty() && (result.pending != 0 || result.waited != 0)) workers_->hasten();
  return result;
}

}  // namespace zs
