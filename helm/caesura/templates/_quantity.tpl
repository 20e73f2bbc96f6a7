{{- /* Bytes of a quantity of memory. Of: key (its name in errors), quantity. */ -}}
{{- define "caesura.bytes" -}}
{{- $units := dict "" 1 "k" 1000 "M" 1000000 "G" 1000000000 "T" 1000000000000 "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776 -}}
{{- /* A number of YAML is a float here, which would be written with an exponent. */ -}}
{{- $text := ternary (printf "%.0f" (float64 .quantity)) (toString .quantity) (kindIs "float64" .quantity) -}}
{{- if not (regexMatch "^[0-9]+([.][0-9]+)?([kMGT]|[KMGT]i)?$" $text) }}{{ fail (printf "%s: %s is no number of bytes, such as 512Mi or 2Gi" .key $text) }}{{ end -}}
{{- $number := regexFind "^[0-9.]+" $text -}}
{{- mulf (float64 $number) (float64 (get $units (trimPrefix $number $text))) | int64 -}}
{{- end -}}
