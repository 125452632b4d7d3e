#include "fold.hpp"

#include <algorithm>
#include <array>

#include "crc32c.hpp"

namespace zs::fold {
namespace {

constexpr uint64_t kOrder = (uint64_t{1} << 31) - 1;  // x^kOrder = 1 mod P

// x^(-8 n) mod P: takes n zero bytes from the end of what has been divided.
uint32_t backwards(uint64_t nbytes) {
  return crc::power(kOrder - 8 * nbytes % kOrder);
}

struct Backwards {
  uint32_t fold = backwards(kBlock);  // the kernel divides as if a block of zeros followed
  std::array<uint32_t, kRow> tail;    // by missing bytes of the last row
  Backwards() {
    for (uint64_t missing = 0; missing < kRow; ++missing) tail[missing] = backwards(missing);
  }
};

// Remainder of one span's bytes, as the register holds it: starting at zeros, not inverted.
uint32_t remainder(const Span& span, const std::byte* residue) {
  static const Backwards back;
  const auto* bytes = reinterpret_cast<const uint8_t*>(residue);
  uint32_t value = crc32c_kernels()[0].crc(0, bytes, span.residue_rows() * kRow);
  if (span.rows > kRows) value = crc::multiply(back.fold, value);
  return span.tail == kRow ? value : crc::multiply(back.tail[kRow - span.tail], value);
}

// Lines of PTX. `$` stands for the row that is unrolled.
class Text {
 public:
  void line(const std::string& text) { text_ += "  " + text + "\n"; }
  void label(const std::string& name) { text_ += name + ":\n"; }
  void each(uint64_t first, uint64_t last, const std::vector<std::string>& lines) {
    for (uint64_t row = first; row < last; ++row)
      for (const std::string& pattern : lines) {
        std::string text = pattern;
        replace(text, "$@", std::to_string(row * kRow));
        replace(text, "$", std::to_string(row));
        line(text);
      }
  }
  // `into` = all of `terms`, XORed; one term is `into` itself.
  void sum(const std::string& into, const std::vector<std::string>& terms) {
    std::string left = terms[0];
    size_t k = 1;
    for (; k + 1 < terms.size(); k += 2, left = into)
      line("lop3.b32 " + into + ", " + left + ", " + terms[k] + ", " + terms[k + 1] + ", 0x96;");
    if (k < terms.size()) line("xor.b32 " + into + ", " + left + ", " + terms[k] + ";");
  }
  std::string take() { return std::move(text_); }

 private:
  static void replace(std::string& text, const std::string& what, const std::string& by) {
    for (size_t at = 0; (at = text.find(what, at)) != std::string::npos; at += by.size())
      text.replace(at, what.size(), by);
  }
  std::string text_;
};

std::string row(const char* name, uint64_t number) {
  return name + std::to_string(number);
}

// How many rows back each term of P but the first lies, the farthest first.
std::vector<uint64_t> lags() {
  std::vector<uint64_t> result;
  for (uint64_t lag = 32; lag >= 1; --lag)
    if (crc::kPolynomial >> (lag - 1) & 1) result.push_back(lag);
  return result;
}

// `into` = those bytes of the word at [%at] that `mask` has; no others are read, for they may be nobody's.
void load_edge(Text& text, const std::string& into, const std::string& mask) {
  text.line("mov.b32 " + into + ", 0;");
  text.line("setp.eq.u32 %p, " + mask + ", 0xFFFFFFFF;");
  text.line("@%p ld.global.cs.u32 " + into + ", [%at];");
  for (int byte = 0; byte < 4; ++byte) {
    const std::string shift = std::to_string(8 * byte);
    text.line("shr.u32 %bits, " + mask + ", " + shift + ";");
    text.line("and.b32 %bits, %bits, 1;");
    text.line("setp.eq.u32 %q, %bits, 1;");
    text.line("setp.ne.and.u32 %q, " + mask + ", 0xFFFFFFFF, %q;");
    text.line("mov.b32 %byte, 0;");
    text.line("@%q ld.global.u8 %byte, [%at+" + std::to_string(byte) + "];");
    text.line("shl.b32 %byte, %byte, " + shift + ";");
    text.line("or.b32 " + into + ", " + into + ", %byte;");
  }
}

}  // namespace

std::string kernel() {
  Text text;
  // Which span, and its words of this lane.
  text.line("mov.u32 %span, %ctaid.x;");
  text.line("mov.u32 %lane, %tid.x;");
  text.line("ld.param.u64 %at, [spans];");
  text.line("mad.wide.u32 %at, %span, 32, %at;");
  text.line("ld.global.u64 %first, [%at];");
  text.line("ld.global.u64 %residue, [%at+8];");
  text.line("ld.global.u32 %rows, [%at+16];");
  text.line("ld.global.u32 %head, [%at+20];");
  text.line("ld.global.u32 %tail, [%at+24];");
  text.line("mad.wide.u32 %first, %lane, 4, %first;");
  text.line("mad.wide.u32 %residue, %lane, 4, %residue;");
  // `skip` rows of the first block lie before the span; `blocks` whole ones follow it.
  text.line("sub.u32 %rest, %rows, 1;");
  text.line("and.b32 %skip, %rest, 31;");
  text.line("sub.u32 %skip, 31, %skip;");
  text.line("shr.u32 %blocks, %rest, 5;");
  // Which bytes of the first and of the last row are the span's: a shift by 32 or more leaves nothing.
  text.line("shl.b32 %word, %lane, 2;");
  text.line("max.u32 %head, %head, %word;");
  text.line("sub.u32 %head, %head, %word;");
  text.line("shl.b32 %head, %head, 3;");
  text.line("shl.b32 %head, 0xFFFFFFFF, %head;");
  text.line("max.u32 %tail, %tail, %word;");
  text.line("sub.u32 %tail, %tail, %word;");
  text.line("shl.b32 %tail, %tail, 3;");
  text.line("shl.b32 %tail, 0xFFFFFFFF, %tail;");
  text.line("not.b32 %tail, %tail;");
  text.line("and.b32 %both, %head, %tail;");
  text.line("setp.eq.u32 %one, %rest, 0;");
  text.line("selp.b32 %head, %both, %head, %one;");
  text.line("selp.b32 %tail, 0, %tail, %one;");
  text.line("mov.u64 %at, %first;");
  load_edge(text, "%begin", "%head");
  text.line("mad.wide.u32 %at, %rest, 128, %first;");
  load_edge(text, "%end", "%tail");
  // The first block. What lies before the span is zeros, which divide to zeros.
  text.line("mul.wide.u32 %at, %skip, 128;");
  text.line("sub.u64 %at, %first, %at;");
  text.each(0, kRows - 1,
            {"mov.b32 %v$, 0;", "setp.gt.u32 %p, $, %skip;", "@%p ld.global.cs.u32 %v$, [%at+$@];",
             "setp.eq.u32 %p, $, %skip;", "selp.b32 %v$, %begin, %v$, %p;"});
  text.line("setp.ne.u32 %many, %blocks, 0;");
  text.line("setp.ne.and.u32 %p, %skip, 31, %many;");
  text.line("mov.b32 %v31, %end;");
  text.line("@%p ld.global.cs.u32 %v31, [%at+3968];");
  text.line("setp.eq.u32 %p, %skip, 31;");
  text.line("selp.b32 %v31, %begin, %v31, %p;");
  text.line("@!%many bra STORE;");
  // Each row becomes a digit of the quotient.
  for (uint64_t t = 0; t < kRows; ++t) {
    std::vector<std::string> terms{row("%v", t)};
    for (const uint64_t lag : lags())
      if (lag <= t) terms.push_back(row("%v", t - lag));
    text.sum(row("%v", t), terms);
  }
  // Whole blocks: a digit takes the place of the one 32 rows before. A row is asked for a block ahead, as
  // soon as the register for it is free.
  text.line("add.u64 %at, %at, 4096;");
  text.line("setp.gt.u32 %many, %blocks, 1;");
  text.each(0, kRows - 1, {"ld.global.cs.u32 %w$, [%at+$@];"});
  text.line("mov.b32 %w31, %end;");
  text.line("@%many ld.global.cs.u32 %w31, [%at+3968];");
  text.label("FOLD");
  text.line("add.u64 %at, %at, 4096;");
  text.line("setp.gt.u32 %many, %blocks, 1;");
  text.line("setp.gt.u32 %q, %blocks, 2;");
  for (uint64_t t = 0; t < kRows; ++t) {
    std::vector<std::string> terms{row("%w", t)};
    for (const uint64_t lag : lags()) terms.push_back(row("%v", (kRows + t - lag) % kRows));
    text.sum(row("%v", t), terms);
    if (t == kRows - 1) text.line("mov.b32 %w31, %end;");
    text.each(t, t + 1,
              {(t == kRows - 1 ? "@%q" : "@%many") + std::string(" ld.global.cs.u32 %w$, [%at+$@];")});
  }
  text.line("sub.u32 %blocks, %blocks, 1;");
  text.line("@%many bra FOLD;");
  // What the quotient leaves in the 32 rows of zeros that come next.
  for (uint64_t t = 0; t < kRows; ++t) {
    std::vector<std::string> terms;
    for (const uint64_t lag : lags())
      if (lag > t) terms.push_back(row("%v", kRows + t - lag));
    text.sum(row("%v", t), terms);
  }
  text.line("mov.u32 %skip, 0;");
  text.label("STORE");
  text.line("mul.wide.u32 %at, %skip, 128;");
  text.line("sub.u64 %at, %residue, %at;");
  text.each(0, kRows, {"setp.ge.u32 %p, $, %skip;", "@%p st.global.u32 [%at+$@], %v$;"});
  text.line("ret;");
  return ".version 7.0\n.target sm_75\n.address_size 64\n.visible .entry " + std::string(kName) +
         "(.param .u64 spans)\n{\n"
         "  .reg .b32 %v<32>, %w<32>;\n"
         "  .reg .b32 %span, %lane, %word, %rows, %rest, %skip, %blocks, %head, %tail, %both;\n"
         "  .reg .b32 %begin, %end, %bits, %byte;\n"
         "  .reg .b64 %at, %first, %residue;\n"
         "  .reg .pred %p, %q, %one, %many;\n" +
         text.take() + "}\n";
}

uint64_t cut(uint64_t at, uint64_t nbytes, uint64_t span_bytes, uint64_t residue, std::vector<Span>& spans) {
  uint64_t total = 0;
  for (const uint64_t end = at + nbytes; at < end;) {
    Span span{};
    span.first = at / kRow * kRow;
    span.residue = residue + total;
    const uint64_t stop = std::min(end, span.first + span_bytes);
    span.rows = static_cast<uint32_t>((stop - span.first + kRow - 1) / kRow);
    span.head = static_cast<uint32_t>(at - span.first);
    span.tail = static_cast<uint32_t>(stop - (span.first + (span.rows - 1) * kRow));
    spans.push_back(span);
    total += span.residue_rows() * kRow;
    at = stop;
  }
  return total;
}

uint32_t checksum(std::span<const Span> spans, const std::byte* residues) {
  uint32_t value = 0;
  uint64_t nbytes = 0;
  for (const Span& span : spans) {
    value = crc32c_combine(value, remainder(span, residues), span.nbytes());
    nbytes += span.nbytes();
    residues += span.residue_rows() * kRow;
  }
  const uint32_t of_zeros = ~crc32c_combine(~uint32_t{0}, 0, nbytes);  // the inversions, at either end
  return value ^ of_zeros;
}

}  // namespace zs::fold
