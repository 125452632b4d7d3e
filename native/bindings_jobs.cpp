#include "bindings.hpp"
#include "bindings_still.hpp"
#include "error.hpp"
#include "prefetch.hpp"
#include "scatter.hpp"
#include "tensors.hpp"
#include "transfer.hpp"
#include "verify.hpp"

namespace zs::python {
namespace {

using Capture = JobOf<zs::Capture>;
using Scatter = JobOf<zs::Scatter>;
using Verify = JobOf<zs::Verify>;
using FileWrite = JobOf<zs::FileWrite>;
using FileRead = JobOf<zs::FileRead>;

struct Pieces {
  zs::Pieces pieces;
};

zs::Pieces pieces_of(nb::handle indexes) {
  if (nb::isinstance<Pieces>(indexes)) return nb::cast<const Pieces&>(indexes).pieces;
  std::vector<uint32_t> numbers;
  for (nb::handle index : indexes) numbers.push_back(nb::cast<uint32_t>(index));
  return std::make_shared<const std::vector<uint32_t>>(std::move(numbers));
}

// What all captures of one survey have in common, told once: to take so many words from Python at each save
// takes longer than to begin a capture.
struct CaptureOrder {
  nb::object pool, sources;
  std::shared_ptr<const zs::Plan> plan;
  zs::Pieces at_once;
  int announce;

  std::unique_ptr<Capture> begin(uint64_t image, uint64_t busy, const Streams& streams, bool forecast,
                                 std::pair<uint64_t, uint64_t> sampling) const {
    auto& tensors = nb::cast<zs::Tensors&>(sources);
    if (!tensors.refresh().empty()) return nullptr;
    zs::Room room = plan->take_room();
    zs::Arrays arrays = tensors.sources(std::move(room.addresses));
    const auto& workers = nb::cast<const zs::Pool&>(pool);
    std::vector<nb::object> keep{pool, sources};
    std::vector<zs::Training> trainings = trainings_of(streams, &keep);
    auto capture = made<zs::Capture>(
        std::move(keep),
        [&] {
          return zs::Capture::begin(workers, plan, std::move(arrays), pointer<std::byte>(image), at_once,
                                    announce, std::move(trainings), forecast ? zs::kForecast : UINT64_MAX,
                                    true, {sampling.first, sampling.second}, 0, std::move(room));
        },
        at_once->size() < kBrief);
    if (busy != 0) __atomic_store_n(pointer<uint8_t>(busy), uint8_t{1}, __ATOMIC_RELAXED);
    return capture;
  }
  std::unique_ptr<Capture> begin_at_rest(Still& still, uint64_t image, uint64_t busy, const Streams& streams,
                                         bool forecast, std::pair<uint64_t, uint64_t> sampling) const {
    if (busy != 0) prefetch(pointer<uint8_t>(busy));
    return still.same() ? begin(image, busy, streams, forecast, sampling) : nullptr;
  }
};

void bind_copies(nb::module_& m) {
  nb::class_<Pieces>(m, "Pieces", "Indexes of pieces, kept so that nobody needs to read them again.")
      .def(
          "__init__", [](Pieces* self, nb::iterable indexes) { new (self) Pieces{pieces_of(indexes)}; },
          "indexes"_a, nb::sig("def __init__(self, indexes: collections.abc.Iterable[int]) -> None"))
      .def("__len__", [](const Pieces& p) { return p.pieces->size(); });

  nb::class_<zs::Protection>(m, "Protection", "What protect() had to do.")
      .def_ro("pending", &zs::Protection::pending, "Chunks that nobody had begun.")
      .def_ro("frozen_bytes", &zs::Protection::frozen_bytes)
      .def_ro("helped_bytes", &zs::Protection::helped_bytes)
      .def_ro("spared_bytes", &zs::Protection::spared_bytes, "Of chunks that stay pending.")
      .def_ro("waited", &zs::Protection::waited, "Seconds, for chunks in flight.");

  nb::class_<zs::Comparison>(m, "Comparison", "What arrived beside what devices held, of sampled chunks.")
      .def_ro("chunks", &zs::Comparison::chunks)
      .def_ro("nbytes", &zs::Comparison::nbytes)
      .def_ro("pieces", &zs::Comparison::pieces, "Those that are different, rising.")
      .def_ro("unchecked", &zs::Comparison::unchecked, "Why a device looked at nothing.");

  nb::class_<Capture, Job>(m, "Capture", "Tensors to image. The image's memory must outlive the job.")
      .def(
          "__init__",
          [](Capture* self, nb::object pool, const Plan& plan, nb::object sources, uint64_t image,
             nb::object at_once, int announce, const Streams& streams, std::optional<uint64_t> ahead,
             bool held, std::pair<uint64_t, uint64_t> sampling, uint64_t peer) {
            zs::Arrays arrays = nb::cast<zs::Tensors&>(sources).sources();
            const auto& workers = nb::cast<const zs::Pool&>(pool);
            std::vector<nb::object> keep{pool, sources};
            std::vector<zs::Training> trainings = trainings_of(streams, &keep);
            const zs::Pieces pieces = pieces_of(at_once);
            const bool brief = trainings.empty() && pieces->size() < kBrief;
            make(
                self, std::move(keep),
                [&] {
                  return zs::Capture::begin(workers, plan.plan, std::move(arrays), pointer<std::byte>(image),
                                            pieces, announce, std::move(trainings),
                                            ahead.value_or(zs::kForecast), held,
                                            {sampling.first, sampling.second}, peer);
                },
                brief);
          },
          "pool"_a, "plan"_a, "sources"_a, "image"_a, nb::kw_only(), "at_once"_a, "announce"_a = -1,
          "streams"_a = Streams(), "ahead"_a.none() = UINT64_MAX, "held"_a = false,
          "sampling"_a = std::pair<uint64_t, uint64_t>(), "peer"_a = 0,
          nb::sig("def __init__(self, pool: Pool, plan: Plan, sources: Tensors, image: int, *, "
                  "at_once: collections.abc.Iterable[int] | Pieces, announce: int = -1, "
                  "streams: collections.abc.Sequence[tuple[Device, int]] = (), ahead: int | None = 2**64 - "
                  "1, held: bool = False, sampling: tuple[int, int] = (0, 0), "
                  "peer: int = 0) -> None"),
          "Pieces in `at_once` (best as Pieces, where it is the same each time) are copied before this "
          "returns. Call sources.refresh() right before.\n\n"
          "At the end 1 is added to the eventfd `announce`, which must stay open until then. `streams`: of "
          "each "
          "device that holds sources the CUstream that training uses now; everything is read as the work it "
          "has "
          "been given leaves it. `ahead`: chunks that a guard waits for, however few of them have landed; "
          "None: as many "
          "as should have landed by then, by what was measured before. `held`: the pool's threads begin "
          "after "
          "start(). `sampling`: (turn, every): every so many-th of a "
          "device's chunks, from the turn-th on "
          "and one at "
          "least, is looked at by the device itself, in the order of its stream; every = 0: none. `peer`: "
          "address of memory of another device; what is on devices goes there, to its place in the image, "
          "and "
          "only the rest into `image`.")
      .def(
          "start", [](const Capture& c) { c.get().start_soon(); },
          "Let the pool's threads begin, a moment later: none is woken within this call.")
      .def(
          "hurry", [](const Capture& c) { c.get().hurry(); },
          "Let them begin now: somebody waits. Any thread.")
      .def(
          "protect",
          [](const Capture& c, uint64_t freeze_bytes, const Streams& streams,
             const std::vector<uint32_t>& left, const std::vector<std::pair<uint32_t, uint64_t>>& kept) {
            const std::vector<zs::Training> trainings = trainings_of(streams, nullptr);
            std::vector<zs::Kept> elsewhere;
            for (const auto& [piece, at] : kept) elsewhere.push_back({piece, pointer<std::byte>(at)});
            nb::gil_scoped_release release;
            return c.get().protect(freeze_bytes, trainings, {left, elsewhere});
          },
          nb::kw_only(), "freeze_bytes"_a = 0, "streams"_a = Streams(), "left"_a = std::vector<uint32_t>(),
          "kept"_a = std::vector<std::pair<uint32_t, uint64_t>>(),
          nb::sig("def protect(self, *, freeze_bytes: int = 0, "
                  "streams: collections.abc.Sequence[tuple[Device, int]] = (), "
                  "left: collections.abc.Sequence[int] = (), "
                  "kept: collections.abc.Sequence[tuple[int, int]] = ()) -> Protection"),
          "Return when no source will be read any more, or by nothing that these streams do not wait for.\n\n"
          "But for chunks of pieces alone that are `left` (their memory stays as it is until the job is "
          "done) "
          "or `kept` "
          "(piece, address: what they hold now lies there, shaped alike, when `release` is called, which "
          "must be).")
      .def(
          "release",
          [](const Capture& c, const Streams& streams) {
            const std::vector<zs::Training> trainings = trainings_of(streams, nullptr);
            nb::gil_scoped_release release;
            c.get().release(trainings);
          },
          nb::kw_only(), "streams"_a = Streams(),
          nb::sig("def release(self, *, streams: collections.abc.Sequence[tuple[Device, int]] = ()) -> None"),
          "What was kept is in its place, or will be when these streams have done what they have been given. "
          "That memory must live until the job is done.")
      .def_prop_ro(
          "pending", [](const Capture& c) { return c.get().pending(); },
          "Pieces that a chunk nobody has begun has bytes of, rising.")
      .def_prop_ro(
          "drain_seconds", [](const Capture& c) { return c.job->done() ? c.get().drain_seconds() : 0.0; },
          "From the beginning until the last chunk had been read (had landed, from a device), when done.")
      .def(
          "compare_sources", [](const Capture& c) { return c.get().compare_sources(); }, nogil(),
          "Whether what arrived is what the devices held, of the sampled chunks, when done.")
      .def_prop_ro(
          "checksums",
          [](const Capture& c) {
            if (!c.job->done() || c.job->cancelled())
              throw zs::Error(zs::Kind::usage, "a capture has checksums when it is done");
            if (c.get().to_peer())
              throw zs::Error(zs::Kind::usage, "what lies in another device's memory has no checksums yet");
            c.job->rethrow();
            return c.get().checksums();
          },
          "CRC-32C of each chunk of the image, when done.")
      .def_prop_ro(
          "on_devices", [](const Capture& c) { return c.get().on_devices(); },
          "Offset and size of what of the image lies on devices, rising.")
      .def(
          "samples",
          [](const Capture& c) {
            std::vector<std::tuple<uint64_t, uint64_t, uint32_t>> samples;
            for (const auto& [offset, nbytes, checksum] : c.get().samples())
              samples.emplace_back(offset, nbytes, checksum);
            return samples;
          },
          nogil(),  // it waits for a device
          "Offset in the image, size and CRC-32C of what the device looked at of its sources, when done.");

  nb::class_<CaptureOrder>(m, "CaptureOrder", "Captures of the same tensors, time and again.")
      .def(
          "__init__",
          [](CaptureOrder* self, nb::object pool, const Plan& plan, nb::object sources, const Pieces& at_once,
             int announce) { new (self) CaptureOrder{pool, sources, plan.plan, at_once.pieces, announce}; },
          "pool"_a, "plan"_a, "sources"_a, nb::kw_only(), "at_once"_a, "announce"_a = -1,
          nb::sig("def __init__(self, pool: Pool, plan: Plan, sources: Tensors, *, at_once: Pieces, "
                  "announce: int = -1) -> None"))
      // Without names and defaults, which take nanobind longer.
      .def("begin", &CaptureOrder::begin,
           nb::sig("def begin(self, image: int, busy: int, "
                   "streams: collections.abc.Sequence[tuple[Device, int]], forecast: bool, "
                   "sampling: tuple[int, int], /) -> Capture | None"),
           "A capture that is held, into the image at that address, after sources.refresh(); None where that "
           "found some that are no longer what they were. `busy`: address of a byte that is 1 from then on, "
           "or 0. `streams` and `sampling` as of Capture; `forecast`: as its ahead=None, else a guard waits "
           "for all chunks.")
      .def("begin_at_rest", &CaptureOrder::begin_at_rest,
           nb::sig("def begin_at_rest(self, still: Still, image: int, busy: int, "
                   "streams: collections.abc.Sequence[tuple[Device, int]], forecast: bool, "
                   "sampling: tuple[int, int], /) -> Capture | None"),
           "Likewise; None also where `still` is not the same.");

  nb::class_<Scatter, Job>(m, "Scatter", "Image to tensors.")
      .def(
          "__init__",
          [](Scatter* self, nb::object pool, const Plan& plan, nb::object targets, uint64_t image,
             std::optional<std::vector<uint32_t>> pieces, std::optional<std::vector<uint32_t>> checksums,
             const Streams& streams) {
            zs::Arrays arrays = nb::cast<zs::Tensors&>(targets).targets();
            const auto& workers = nb::cast<const zs::Pool&>(pool);
            if (!pieces) {
              pieces.emplace(plan.plan->pieces());
              for (size_t k = 0; k < pieces->size(); ++k) (*pieces)[k] = static_cast<uint32_t>(k);
            }
            std::vector<nb::object> keep{pool, targets};
            std::vector<zs::Training> trainings = trainings_of(streams, &keep);
            make(self, std::move(keep), [&] {
              return zs::Scatter::begin(workers, plan.plan, std::move(arrays),
                                        pointer<const std::byte>(image), std::move(*pieces),
                                        std::move(checksums), trainings);
            });
          },
          "pool"_a, "plan"_a, "targets"_a, "image"_a, "pieces"_a.none() = nb::none(), nb::kw_only(),
          "checksums"_a.none() = nb::none(), "streams"_a = Streams(),
          nb::sig("def __init__(self, pool: Pool, plan: Plan, targets: Tensors, image: int, "
                  "pieces: collections.abc.Sequence[int] | None = None, *, "
                  "checksums: collections.abc.Sequence[int] | None = None, "
                  "streams: collections.abc.Sequence[tuple[Device, int]] = ()) -> None"),
          "targets[i] receives piece pieces[i]; None: all pieces. `streams` as for a Capture.\n\n"
          "With `checksums` each chunk is checked while it is copied (before, where it goes to a device); "
          "the "
          "first that fails ends the job with CorruptError, and what was written by then stays.");
}

void bind_files(nb::module_& m) {
  nb::class_<Verify, Job>(m, "Verify", "An image in memory against its checksums.")
      .def(
          "__init__",
          [](Verify* self, nb::object pool, uint64_t image, uint64_t nbytes, uint64_t chunk_bytes,
             std::vector<uint32_t> checksums) {
            const auto& workers = nb::cast<const zs::Pool&>(pool);
            make(self, {pool}, [&] {
              return zs::Verify::begin(workers, pointer<const std::byte>(image), nbytes, chunk_bytes,
                                       std::move(checksums));
            });
          },
          "pool"_a, "image"_a, "nbytes"_a, "chunk_bytes"_a, "checksums"_a,
          nb::sig("def __init__(self, pool: Pool, image: int, nbytes: int, chunk_bytes: int, "
                  "checksums: collections.abc.Sequence[int]) -> None"))
      .def_prop_ro("bad", [](const Verify& v) { return v.get().bad(); }, "Chunks found bad so far.");

  nb::class_<FileWrite, Job>(m, "FileWrite",
                             "Image to file. CorruptError: the image fails a checksum. Syncs nothing.")
      .def(
          "__init__",
          [](FileWrite* self, nb::object pool, int fd, uint64_t image, uint64_t nbytes, uint64_t chunk_bytes,
             std::vector<uint32_t> checksums, bool direct, const std::optional<std::vector<uint64_t>>& only) {
            const auto& workers = nb::cast<const zs::Pool&>(pool);
            make(self, {pool}, [&] {
              return zs::FileWrite::begin(workers, fd, pointer<const std::byte>(image), nbytes, chunk_bytes,
                                          std::move(checksums), direct, only);
            });
          },
          "pool"_a, "fd"_a, "image"_a, "nbytes"_a, nb::kw_only(), "chunk_bytes"_a, "checksums"_a, "direct"_a,
          "only"_a = nb::none(),
          nb::sig("def __init__(self, pool: Pool, fd: int, image: int, nbytes: int, *, chunk_bytes: int, "
                  "checksums: collections.abc.Sequence[int], direct: bool, "
                  "only: collections.abc.Sequence[int] | None = None) -> None"),
          "With `only`, no chunk but these is written, and what the file has of the others stays.")
      .def(
          "hold", [](const FileWrite& w) { w.job->hold(); },
          "Begin nothing more until go_on(); what is in flight ends.")
      .def("go_on", [](const FileWrite& w) { w.job->go_on(); })
      .def_prop_ro(
          "fell_back", [](const FileWrite& w) { return w.get().fell_back(); },
          "Why the page cache was used although `direct` was asked for.");

  nb::class_<FileRead, Job>(m, "FileRead", "File to image.")
      .def(
          "__init__",
          [](FileRead* self, nb::object pool, int fd, uint64_t image, uint64_t nbytes, uint64_t chunk_bytes,
             std::vector<uint32_t> checksums, bool direct, const std::optional<std::vector<uint64_t>>& only) {
            const auto& workers = nb::cast<const zs::Pool&>(pool);
            make(self, {pool}, [&] {
              return zs::FileRead::begin(workers, fd, pointer<std::byte>(image), nbytes, chunk_bytes,
                                         std::move(checksums), direct, only);
            });
          },
          "pool"_a, "fd"_a, "image"_a, "nbytes"_a, nb::kw_only(), "chunk_bytes"_a, "checksums"_a, "direct"_a,
          "only"_a = nb::none(),
          nb::sig("def __init__(self, pool: Pool, fd: int, image: int, nbytes: int, *, chunk_bytes: int, "
                  "checksums: collections.abc.Sequence[int], direct: bool, "
                  "only: collections.abc.Sequence[int] | None = None) -> None"),
          "With `only`, no chunk but these is read.")
      .def_prop_ro(
          "bad", [](const FileRead& r) { return r.get().bad(); },
          "Chunks so far that fail their checksum or that the file does not have.")
      .def_prop_ro(
          "verified", [](const FileRead& r) { return r.get().verified(); },
          "Chunks 0 to verified - 1 are in the image and whole.")
      .def_prop_ro(
          "fell_back", [](const FileRead& r) { return r.get().fell_back(); },
          "Why the page cache was used although `direct` was asked for.");
}

}  // namespace

void bind_jobs(nb::module_& m) {
  bind_copies(m);
  bind_files(m);
}

}  // namespace zs::python
