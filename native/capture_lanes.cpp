// What of a capture lies on devices: their lanes bring it, chunk by chunk.
#include <algorithm>
#include <utility>

#include "capture.hpp"
#include "error.hpp"

namespace zs {

namespace {

// Of a piece in memory that several share.
uint64_t staged_bytes(uint64_t nbytes) {
  constexpr uint64_t kAligned = 256;
  return (nbytes + kAligned - 1) / kAligned * kAligned;
}

std::span<const uint32_t> pieces_of(const AtOnce& at_once) {
  return at_once.pieces ? *at_once.pieces : std::span<const uint32_t>();
}

}  // namespace

void check_devices(const Arrays& arrays, std::span<const Training> trainings) {
  if (!arrays.places) return;
  for (size_t k = 0; k < arrays.places->size(); ++k) {
    const auto serves = [place = arrays.place(k)](const Training& one) {
      return one.device->ordinal() == place;
    };
    if (arrays.place(k) != Arrays::kHost && std::none_of(trainings.begin(), trainings.end(), serves))
      throw Error(Kind::usage, "tensor " + std::to_string(k) + " is on CUDA device " +
                                   std::to_string(arrays.place(k)) + ", for which no stream was given");
  }
}

// Works out what has to be known at once: the rest, which takes longer, whoever first needs the copies.
Capture::Drain Capture::drain_of(const Plan& plan, const Arrays& sources, std::byte* image,
                                 const AtOnce& at_once, Training training, uint64_t ahead, CUdeviceptr peer) {
  const int16_t place = static_cast<int16_t>(training.device->ordinal());
  Drain drain{std::move(training), std::make_shared<Lane>(), {}, cuda::Way::within, 0, {}, {}, {}};
  Lane& lane = *drain.lane;
  lane.way = peer != 0 ? cuda::Way::to_peer : cuda::Way::to_host;
  lane.ahead = ahead;
  drain.base = peer != 0 ? peer : reinterpret_cast<CUdeviceptr>(image);
  drain.route = plan.route(sources, place);
  lane.coming = drain.route->parts.size();
  // What may change right away is copied within the device, in the order of training's own work, and drained
  // from there; straight to the image, which takes training longer, where the device has no memory for it.
  const std::span<const uint32_t> pieces = pieces_of(at_once);
  uint64_t total = 0;
  for (const uint32_t k : pieces)
    if (sources.place(k) == place) total += staged_bytes(plan.size(k));
  if (total == 0) return drain;
  drain.training.device->refuse_capturing(drain.training.stream);  // memory may be taken now
  lane.staged = drain.training.device->vram()->lend(total);
  if (!lane.staged) {
    drain.at_once_way = lane.way;
    lane.pinned = peer != 0 || cuda::is_pinned(image);
  }
  uint64_t at = 0;
  for (const uint32_t k : pieces) {
    if (sources.place(k) != place || plan.size(k) == 0) continue;
    const CUdeviceptr to = lane.staged ? lane.staged.at() + at : drain.base + plan.offset(k);
    drain.at_once.push_back({to, reinterpret_cast<CUdeviceptr>(sources.data[k]), plan.size(k)});
    at += staged_bytes(plan.size(k));
  }
  return drain;
}

// The copies of the drain's lane, each from where its bytes are as they were at the beginning.
void Capture::fill(Drain& drain) const {
  Lane& lane = *drain.lane;
  const Route& route = *drain.route;
  lane.pinned = to_peer() || cuda::is_pinned(image_);  // the driver takes its time to say so
  std::vector<CUdeviceptr> from(plan_->pieces());
  for (size_t k = 0; k < from.size(); ++k)
    if (sources_.place(k) == route.place) from[k] = reinterpret_cast<CUdeviceptr>(sources_.data[k]);
  uint64_t at = 0;
  for (const uint32_t k : pieces_of(*at_once_)) {
    if (sources_.place(k) != route.place) continue;
    from[k] = lane.staged ? lane.staged.at() + at : 0;  // 0: it is in its place already
    at += staged_bytes(plan_->size(k));
  }
  lane.parts.reserve(route.parts.size());
  lane.copies.reserve(route.runs.size());
  drain.runs.reserve(route.runs.size());
  drain.firsts.reserve(route.parts.size());
  for (const Route::Part& part : route.parts) {
    drain.firsts.push_back(lane.copies.size());
    lane.open(part.chunk);
    for (size_t n = part.first; n < part.last; ++n) {
      const Route::Run& run = route.runs[n];
      if (from[run.piece] == 0) continue;
      lane.add({drain.base + run.offset, from[run.piece] + run.begin, run.nbytes});
      drain.runs.push_back({run.piece, run.begin});
    }
  }
}

void Capture::start_lanes() {
  for (Drain& drain : drains_) {
    drain.lane->landing = this;
    drain.lane->fill = [this, &drain](Lane&) { fill(drain); };
    drain.training.device->begin(drain.lane, drain.training.stream, drain.at_once, drain.at_once_way,
                                 shared_from_this());
  }
}

void Capture::landed(std::span<const uint64_t> chunks) noexcept {
  uint64_t partly = 0;
  bool more = false;
  {
    const std::lock_guard lock(aside_mutex_);
    arriving_ -= chunks.size();
    for (const uint64_t chunk : chunks) {
      if (bring(chunk))
        landed_.push_back(chunk);
      else
        ++partly;
    }
    more = !landed_.empty() && may_check();
  }
  if (more) ask_for_workers();
  retire(partly);
}

void Capture::dropped(uint64_t chunks, std::exception_ptr why) noexcept {
  fail(std::move(why));
  retire(chunks);
}

uint64_t Capture::drop_kept() noexcept {
  uint64_t parts = 0;
  for (const Drain& drain : drains_) parts += drain.training.device->drop(*drain.lane);
  return parts;
}

void Capture::close(bool) {
  seconds_ = std::chrono::duration<double>(std::chrono::steady_clock::now() - begun_).count();
}

std::vector<std::pair<uint64_t, uint64_t>> Capture::on_devices() const {
  std::vector<std::pair<uint64_t, uint64_t>> runs;
  for (size_t k = 0; k < plan_->pieces(); ++k) {
    if (sources_.place(k) == Arrays::kHost || plan_->size(k) == 0) continue;
    if (!runs.empty() && runs.back().first + runs.back().second == plan_->offset(k))
      runs.back().second += plan_->size(k);
    else
      runs.emplace_back(plan_->offset(k), plan_->size(k));
  }
  return runs;
}

double Capture::drain_seconds() const {
  double most = drains_.empty() ? seconds_ : 0;
  for (const Drain& drain : drains_) most = std::max(most, drain.lane->seconds);
  return most;
}

}  // namespace zs
