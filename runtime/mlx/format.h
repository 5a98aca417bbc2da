// What mlx-c 0.7 needs of `std::format` where the compiler's library has none (gcc 12): `{}` placeholders, nothing else.
// Included before every mlx-c source by setup.py; does nothing where the library has its own.
#pragma once
#include <version>
#ifndef __cpp_lib_format
#include <sstream>
#include <string>
#include <string_view>

namespace std {
inline void loaf_format_to(ostringstream& out, string_view text) {
  out << text;
}

template <typename First, typename... Rest>
void loaf_format_to(ostringstream& out, string_view text, const First& first, const Rest&... rest) {
  const auto at = text.find("{}");
  if (at == string_view::npos) {
    out << text;
    return;
  }
  out << text.substr(0, at) << first;
  loaf_format_to(out, text.substr(at + 2), rest...);
}

template <typename... Args>
string format(string_view text, const Args&... args) {
  ostringstream out;
  loaf_format_to(out, text, args...);
  return out.str();
}
} // namespace std
#endif
